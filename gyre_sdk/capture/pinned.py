"""How a call is sampled: what the server pins, what the harness asks for, what the context leaves room for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre_sdk.capture.config import PinnedSampling
from gyre_sdk.capture.model import SamplingRequest
from gyre_sdk.sampling import Sampling


def pinned_sampling(
    pinned: PinnedSampling, asked: SamplingRequest, stop_ids: Sequence[int], room: int | None, number: int
) -> Sampling:
    """room: tokens that prompt and context length leave, None = no limit known. number: tells calls apart in their seeds."""
    wanted = [n for n in (pinned.max_new_tokens, asked.max_tokens, room) if n is not None]
    return Sampling(
        max_new_tokens=max(1, min(wanted, default=4096)),
        temperature=_first(pinned.temperature, asked.temperature, 1.0),
        top_p=_first(pinned.top_p, asked.top_p, 1.0),
        top_k=int(_first(pinned.top_k, asked.top_k, -1)),
        stop_token_ids=tuple(stop_ids),
        seed=None if pinned.seed is None else (pinned.seed * 1_000_003 + number) % 2**31,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def recorded(sampling: Sampling) -> dict[str, bool | float | int | str | list[int | str]]:
    """As an intent holds it; `msgspec.convert` reads it back."""
    return {key: value for key, value in msgspec.to_builtins(sampling).items() if value is not None}
