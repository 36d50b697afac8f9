"""One reply put together from the pieces that several engines sampled: ids, logprobs and version spans, joined exactly."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_sdk.errors import EngineError


class SpanIn(msgspec.Struct, frozen=True):
    """SGLang's `weight_versions` entry."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True):
    """What the router reads of `meta_info`."""

    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    finish_reason: dict[str, Any] | None = None
    weight_version: str | int | None = None
    weight_versions: list[SpanIn] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class Event(msgspec.Struct, frozen=True):
    """One SSE event of an engine."""

    output_ids: list[int] = []
    meta_info: Meta = Meta()
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode


class Joined:
    """The reply so far. `base` tokens came from earlier engines; the running attempt counts from there."""

    def __init__(self, prompt_tokens: int, wants_logprobs: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.logprobs: list[tuple[float | None, int, Any]] = []
        self.finish: dict[str, Any] | None = None
        self.cached_tokens = 0
        self.retractions = 0
        self.recomputed_tokens = 0
        self.attempts = 0
        self.version: str = ""
        self._wants_logprobs = wants_logprobs
        self._base = 0
        self._earlier: list[SpanIn] = []
        self._current: list[SpanIn] = []
        self._earlier_retractions = 0

    def begin(self) -> None:
        """Another engine goes on from here."""
        self._earlier = self.spans
        self._earlier_retractions = self.retractions
        self._current = []
        self._base = len(self.ids)
        self.attempts += 1

    def take(self, event: Event, source: str) -> int:
        """Add what is new in an event, cumulative or not; returns how many tokens that is. Raises EngineError when it does not add up."""
        meta, ids = event.meta_info, event.output_ids
        had, total = len(self.ids) - self._base, meta.completion_tokens
        entries = meta.output_token_logprobs or []
        new = ids[had:] if len(ids) == total else ids
        if had + len(new) != total:
            raise EngineError(f"{source}: {had} + {len(new)} tokens where it counts {total}")
        if self._wants_logprobs:
            added = entries[had:] if len(entries) == total else entries
            if len(added) != len(new) or any(entry[1] != token for entry, token in zip(added, new)):
                raise EngineError(f"{source}: {len(added)} logprobs for {len(new)} new tokens, or of other tokens")
            self.logprobs += added
        self.ids += new
        if not had and self.attempts == 1:
            self.cached_tokens = meta.cached_tokens
        elif not had and new:
            self.recomputed_tokens += self.prompt_tokens + self._base - meta.cached_tokens
        self.retractions = self._earlier_retractions + meta.num_retractions
        self.version = str(meta.weight_version if meta.weight_version is not None else self.version)
        self._current = meta.weight_versions or ([SpanIn(self.version, 0, total)] if total else [])
        return len(new)

    @property
    def spans(self) -> list[SpanIn]:
        """Version spans over the whole output; neighbours of one version are one span."""
        spans = list(self._earlier)
        for span in self._current:
            start, end = span.start + self._base, min(span.end + self._base, len(self.ids))
            if start >= end:
                continue
            if spans and spans[-1].version == span.version and spans[-1].end == start:
                spans[-1] = SpanIn(span.version, spans[-1].start, end)
            else:
                spans.append(SpanIn(span.version, start, end))
        return spans

    def event(self, rid: str, start: int, engine: str, finish: dict[str, Any] | None) -> dict[str, Any]:
        """What the client gets: tokens from `start` on, and meta_info over the whole reply."""
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached_tokens,
            "num_retractions": self.retractions,
            "weight_version": self.version,
            "weight_versions": self.spans,
            "engine": engine,
            "attempts": self.attempts,
            "recomputed_tokens": self.recomputed_tokens,
        }
        if self._wants_logprobs:
            meta["output_token_logprobs"] = self.logprobs[start:]
            meta["output_token_logprobs_length"] = len(self.ids)
        return {"output_ids": self.ids[start:], "meta_info": meta}
