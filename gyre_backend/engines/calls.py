"""One `/generate` call inside the embedded engine: what was asked, checked; what has been sampled so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_backend.engines.kv import SequenceKV
from gyre_backend.engines.sampler import SamplingParams
from gyre_sdk.errors import EngineError


class BadCallError(EngineError):
    """What was asked can't be served; answered as 400."""

    status = 400


class GenerateBody(msgspec.Struct, frozen=True):
    """SGLang's request, as far as the embedded engine serves it. Unknown fields are ignored, as there."""

    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None

    def check(self, vocab_size: int, context_length: int) -> NDArray[np.int32]:
        """The prompt as `int32[n]`. Raises BadCallError; nothing that passes can break the engine."""
        count, params = len(self.input_ids), self.sampling_params
        problem = params.problem()
        if not count:
            problem = "input_ids is empty"
        elif not all(0 <= token < vocab_size for token in self.input_ids):
            strange = next(token for token in self.input_ids if not 0 <= token < vocab_size)
            problem = f"token id {strange} is outside the vocabulary of {vocab_size}"
        elif count >= context_length:
            problem = f"The input ({count} tokens) is longer than the model's context length ({context_length} tokens)."
        elif count + params.max_new_tokens > context_length:
            problem = (
                f"Requested token count exceeds the model's maximum context length of {context_length} tokens: "
                f"{count} of input and {params.max_new_tokens} of max_new_tokens."
            )
        elif self.return_logprob and self.logprob_start_len is not None and self.logprob_start_len >= 0:
            problem = "the embedded engine gives logprobs of outputs only (logprob_start_len must be -1)"
        elif self.rid == "":
            problem = "rid is empty"
        if problem:
            raise BadCallError(problem)
        return np.asarray(self.input_ids, np.int32)


class Update(msgspec.Struct, frozen=True):
    """What one step added to a call. `finish` is set once, on the last one."""

    count: int
    """Output tokens so far."""
    finish: dict[str, Any] | None = None


class Call:
    """A live call. Owned by the engine's thread; others read what lies behind `Update.count`."""

    def __init__(
        self, rid: str, prompt: NDArray[np.int32], body: GenerateBody, deliver: Callable[[Update], None]
    ) -> None:
        self.rid = rid
        self.params = body.sampling_params
        self.salt = (body.cache_salt, body.extra_key)
        self.deliver = deliver
        self.prompt_tokens = len(prompt)
        self.length = len(prompt)
        self._ids = np.empty(len(prompt) + max(1, self.params.max_new_tokens), np.int32)
        self._ids[: len(prompt)] = prompt
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int, int]] = []
        self.kv: SequenceKV | None = None
        self.cached_tokens = 0
        self.retractions = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        """Prompt and output so far."""
        return self._ids[: self.length]

    @property
    def prompt(self) -> NDArray[np.int32]:
        """What it was asked with, `int32[prompt_tokens]`."""
        return self._ids[: self.prompt_tokens]

    @property
    def output(self) -> NDArray[np.int32]:
        """Output so far."""
        return self._ids[self.prompt_tokens : self.length]

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed; at 1 the call decodes."""
        return self.length - (self.kv.length if self.kv is not None else 0)

    def add(self, token: int, logprob: float, version: str) -> None:
        """One sampled token."""
        at = self.length - self.prompt_tokens
        self._ids[self.length] = token
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], at + 1)
        else:
            self.spans.append((version, at, at + 1))
        self.length += 1

    def finish(self, eos: frozenset[int]) -> dict[str, Any] | None:
        """Why the call ends with its latest token, or None."""
        count = self.length - self.prompt_tokens
        if count and not self.params.ignore_eos:  # as in SGLang, ignore_eos also ignores stop_token_ids
            last = int(self._ids[self.length - 1])
            if last in eos or last in (self.params.stop_token_ids or ()):
                return {"type": "stop", "matched": last}
        if count >= self.params.max_new_tokens:
            return {"type": "length", "length": self.params.max_new_tokens}
        return None

    def versions(self, count: int) -> list[dict[str, Any]]:
        """SGLang's `weight_versions` over the first `count` output tokens."""
        return [
            {"version": version, "start": start, "end": min(end, count)}
            for version, start, end in list(self.spans)
            if start < count
        ]
