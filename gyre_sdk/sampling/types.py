"""Token in, token out: what is asked of an engine, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_sdk.wire.records import Span

Finish = Literal["stop", "length", "abort", "error"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Logprobs come back at `temperature`, before top-p and top-k cut anything off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a reply; the id itself is part of the reply."""
    ignore_eos: bool = False
    seed: int | None = None

    def to_params(self) -> dict[str, object]:
        """SGLang's `sampling_params`."""
        params: dict[str, object] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            params["ignore_eos"] = True
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. No `rid` may be a prefix of another live one: an abort matches by prefix."""

    rid: str
    input_ids: NDArray[np.int32]
    sampling: Sampling
    cache_salt: str | None = None
    session: str = ""
    """The execution's id: a router keeps a session on one engine."""


class Chunk(msgspec.Struct, frozen=True):
    """New tokens of a reply, in order."""

    output_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version: int | None = None
    """Policy version that sampled them, when the engine tells it while it streams."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a reply, and the whole of it. `abort` is a success with what was sampled so far."""

    finish: Finish
    output_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[Span, ...] = ()
    """Policy versions, as spans over the output tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    engine: str = ""
    """URL or name of the engine that answered."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves."""

    model: str
    vocab_size: int
    context_length: int
    weight_version: int


class TokenClient(Protocol):
    """An engine, or a router in front of many."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Completion]:
        """Any number of `Chunk`s, then exactly one `Completion` with the whole output.

        Raises ContextOverflowError, EngineGoneError (no answer, or cut in mid-stream), EngineError (refused).
        """
        ...

    async def abort(self, rid: str) -> None:
        """Ask for the end of a call; its own `generate` then completes with `abort`."""
        ...

    async def model_info(self) -> ModelInfo:
        """What the engine serves now."""
        ...
