"""A call in progress: what the engine said so far, and who waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_sdk.capture.model import TAIL, ChatRenderer, Ids, ParsedReply, Reply, Tool
from gyre_sdk.errors import GyreError
from gyre_sdk.sampling import Sampling
from gyre_sdk.wire.records import Span


@dataclass(slots=True)
class Sampled:
    """Tokens of a reply with their logprobs and policy versions, over one or more engine attempts."""

    ids: list[Ids] = field(default_factory=list)
    logprobs: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = field(default_factory=list)
    versions: list[Span] = field(default_factory=list)
    """Of finished attempts."""
    heard: list[Span] = field(default_factory=list)
    """Of the running attempt, as far as the engine tells them while it streams."""
    size: int = 0

    def add(self, ids: Ids, logprobs: np.ndarray[tuple[int], np.dtype[np.float32]], version: int | None = None) -> None:
        """Append new tokens."""
        if not len(ids):
            return
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        start, self.size = self.size, self.size + len(ids)
        if version is not None:
            if self.heard and self.heard[-1].version == version and self.heard[-1].end == start:
                start = self.heard.pop().start
            self.heard.append(Span(version, start, self.size))

    def all_ids(self) -> Ids:
        """int32[size]."""
        return np.concatenate(self.ids).astype(np.int32) if self.ids else np.empty(0, np.int32)

    def all_logprobs(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """float32[size]."""
        return np.concatenate(self.logprobs).astype(np.float32) if self.logprobs else np.empty(0, np.float32)

    def spans(self, version: int) -> tuple[Span, ...]:
        """Versions of all tokens; where nobody told that of an unfinished attempt it counts as `version`."""
        spans = list(self.versions)
        for span in [*self.heard, Span(version, self.size, self.size)]:
            covered = spans[-1].end if spans else 0
            if span.start > covered:
                spans.append(Span(version, covered, span.start))
            if span.end > span.start:
                spans.append(span)
        return tuple(spans)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one version as one span."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = Span(span.version, found.pop().start, span.end)
        found.append(span)
    return found


@dataclass(frozen=True, slots=True)
class Update:
    """One step of a reply for those who wait: `reply` is set once, at the end; `idle` means only time has passed."""

    partial: ParsedReply | None = None
    reply: Reply | None = None
    idle: bool = False


class LiveCall:
    """A call from its intent until its reply has been delivered whole, or given up."""

    def __init__(self, number: int, rid: str, prompt: Ids, tools: Sequence[Tool], renderer: ChatRenderer) -> None:
        self.number = number
        self.rid = rid
        self.created = time.time()
        self.prompt: Ids | None = prompt
        self.tail = prompt[-TAIL:].copy()
        self.prompt_tokens = len(prompt)
        self.tools = tuple(tools)
        self.sampled = Sampled()
        self.reply: Reply | None = None
        self.error: GyreError | None = None
        self.first_token_at: float | None = None
        self.cached_tokens = 0
        self.consumers = 0
        self.delivered = False
        self.task: asyncio.Task[None] | None = None
        self.sampling: Sampling | None = None
        self.abandoned = False
        self.interrupted = False
        """A restart cut it off, and no retry has asked for it yet."""
        self.first_attempt = 0
        """Number of its first attempt at the engine in this process; not 0 for a call that a restart interrupted."""
        self.kept = 0
        """Tokens that are on disk as `Partial` records."""
        self.kept_at = time.monotonic()
        self.version_hint = -1
        """Policy version last seen, for partial tokens of a stream that broke before it told its version."""
        self.marks: dict[str, str] = {}
        self.prompt_key = b""
        self.give_up: asyncio.TimerHandle | None = None
        self._renderer = renderer
        self._news = asyncio.Event()
        self._partial = ParsedReply()
        self._parsed_size = 0
        self._parsed_at = 0.0
        self._parse_cost = 0.0

    @property
    def done(self) -> bool:
        """Whether the reply is committed, or the call has failed."""
        return self.reply is not None or self.error is not None

    def tell(self) -> None:
        """Wake everyone who waits."""
        self._news.set()
        self._news = asyncio.Event()

    def partial(self, now: float) -> ParsedReply | None:
        """What the unfinished reply says so far; None when there is nothing new to tell.

        Reading a reply anew costs as much as it is long, so it is done at most a twentieth of the time.
        """
        if self.sampled.size == self._parsed_size or now - self._parsed_at < 20 * self._parse_cost:
            return None
        started = time.monotonic()
        self._partial = self._renderer.parse(self.sampled.all_ids(), self.tail, self.tools, final=False)
        self._parsed_size = self.sampled.size
        self._parsed_at = now
        self._parse_cost = min(0.05, time.monotonic() - started)
        return self._partial

    async def updates(self, keepalive_s: float) -> AsyncIterator[Update]:
        """Partial replies as tokens arrive, `idle` after each silence, the whole reply at the end.

        Raises the call's error. Any number of waiters may listen.
        """
        told = 0
        while True:
            if self.error is not None:
                raise self.error
            if self.reply is not None:
                yield Update(reply=self.reply)
                return
            news = self._news
            if self.sampled.size > told:
                first = told == 0
                partial = self.partial(time.monotonic())
                if partial is not None or first:
                    told = self.sampled.size
                    yield Update(partial=partial or self._partial)
                    continue
            try:
                # A reply that is not read yet because reading is dear is looked at again soon.
                wait = keepalive_s if self.sampled.size == told else max(0.005, 20 * self._parse_cost)
                await asyncio.wait_for(news.wait(), wait)
            except TimeoutError:
                if self.sampled.size == told:
                    yield Update(idle=True)

    async def finished(self) -> Reply:
        """The whole reply. Raises the call's error."""
        while not self.done:
            await self._news.wait()
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply
