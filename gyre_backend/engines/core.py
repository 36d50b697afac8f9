"""The embedded engine's thread: continuous batching over live calls, one packed forward pass a step.

Everything here belongs to one thread. Others hand work in through `submit` and `ask`, and read counters.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gyre_backend.engines.calls import BadCallError, Call, Update
from gyre_backend.engines.forward import Piece, step
from gyre_backend.engines.journal import Journal
from gyre_backend.engines.kv import PrefixCache, SequenceKV, common_prefix
from gyre_backend.engines.sampler import sample

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")
_log = logging.getLogger(__name__)

WORTH_WAITING = 32
"""Tokens: a call waits a step for a running prefill that computes at least so many of its leading tokens."""
_RESERVE = 256
"""Tokens of output for which there must be room before a call starts; what grows past that may be retracted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine. Tokens of KV count running calls and the prefix cache together."""

    max_batch: int
    kv_tokens: int
    context_length: int
    prefill_tokens: int
    """Prompt tokens computed per step, so that decoding calls are not held up by a long prompt."""


class EngineCore:
    """Runs calls on `model` (prepared by `forward.prepare`)."""

    def __init__(self, model: Any, limits: Limits, version: str, eos: frozenset[int], journal: Journal | None) -> None:
        self.limits = limits
        self.version = version
        self.paused = False
        self.running: list[Call] = []
        self.waiting: deque[Call] = deque()
        self.generated_tokens = 0
        self._model = model
        self._eos = eos
        self._journal = journal
        self._live: set[str] = set()
        self._cache = PrefixCache(limits.kv_tokens)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._when_idle: list[Callable[[], None]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gyre-engine", daemon=True)
        self._thread.start()

    # ---- from other threads ----

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread between two steps."""
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(BadCallError("the engine is closed"))
        else:
            self._inbox.put(lambda: _settle(future, work))
        return future

    def ask_when_idle(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` once nothing runs, or at once while paused; no call starts in between."""
        future: Future[T] = Future()
        self._inbox.put(lambda: self._when_idle.append(lambda: _settle(future, work)))
        return future

    def close(self) -> None:
        """End the thread; live calls end as aborted."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            self._thread.join(60)

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    @property
    def used_tokens(self) -> int:
        """Tokens of KV held by running calls."""
        return sum(call.length for call in list(self.running))

    @property
    def cached_tokens(self) -> int:
        """Tokens of KV held by the prefix cache."""
        return self._cache.tokens

    # ---- on the engine's thread, through `ask` ----

    def submit(self, call: Call) -> None:
        """Take a call in. Raises BadCallError for a rid that is live."""
        if call.rid in self._live:
            raise BadCallError(f"Duplicate request ID detected: {call.rid}")
        self._live.add(call.rid)
        self.waiting.append(call)

    def abort(self, rid: str) -> None:
        """End the live call `rid` and, as SGLang does, every one that starts with it; no live call, no effect."""
        if rid in self._live:
            self._abort(lambda call: call.rid.startswith(rid))

    def abort_all(self) -> None:
        """End every call."""
        self._abort(lambda call: True)

    def pause(self, mode: PauseMode) -> None:
        """Stop: end calls with what they have (abort), requeue them (retract), or freeze them (in_place)."""
        self.paused = True
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for call in reversed(self.running):
                self._retract(call)
            self.running.clear()

    def resume(self) -> None:
        """Go on."""
        self.paused = False

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while calls hold KV."""
        if self.running:
            return False
        self._cache.clear()
        return True

    def new_version(self, version: str, *, flush: bool) -> None:
        """Tokens sampled from now on are of this version."""
        self.version = version
        if flush:
            self._cache.clear()

    def held(self, salt: Hashable, ids: NDArray[np.int32]) -> tuple[int, SequenceKV | None]:
        """The most leading tokens of `ids` that the cache holds, and a copy of their keys and values."""
        return self._cache.longest(salt, ids)

    def keep(self, salt: Hashable, ids: NDArray[np.int32], kv: SequenceKV) -> None:
        """Put keys and values that came from elsewhere into the cache; running calls have the first claim on the room."""
        self._cache.add(salt, ids, kv)
        self._cache.shrink(max(0, self.limits.kv_tokens - self._capacity()))

    # ---- the loop ----

    def _run(self) -> None:
        while self._take_work():
            if self._when_idle and (self.paused or not self.running):
                work, self._when_idle = self._when_idle, []
                for item in work:
                    item()
            if self.paused:
                continue
            try:
                self._step()
            except Exception as error:
                # The boundary of the thread: whatever a model does to one batch must not end the server.
                _log.exception("a step of the embedded engine failed")
                self._fail(f"{type(error).__name__}: {error}")
        self.abort_all()

    def _take_work(self) -> bool:
        """Run what was handed in; wait for it when there is nothing else to do. False at the end."""
        busy = bool(self._when_idle) and (self.paused or not self.running)
        busy = busy or (not self.paused and bool(self.running or self.waiting))
        while True:
            try:
                item = self._inbox.get(block=not busy)
            except queue.Empty:
                return True
            if item is None:
                return False
            item()
            busy = True

    def _step(self) -> None:
        self._admit()
        self._make_room()
        pieces, calls = self._pieces()
        if not calls:
            return
        logits = step(self._model, pieces)
        done = [row for row, call in enumerate(calls) if call.pending == 0]
        if not done:
            return
        ready = [calls[row] for row in done]
        tokens, logprobs = sample(logits[done], [c.params for c in ready], [c.length for c in ready])
        for call, token, logprob in zip(ready, tokens, logprobs):
            call.add(token, logprob, self.version)
            finish = call.finish(self._eos)
            if finish is not None:
                self.running.remove(call)
                self._end(call, finish)
            else:
                call.deliver(Update(call.length - call.prompt_tokens))
        self.generated_tokens += len(ready)

    def _pieces(self) -> tuple[list[Piece], list[Call]]:
        budget = self.limits.prefill_tokens
        pieces, calls = [], []
        for call in self.running:
            assert call.kv is not None
            count = call.pending
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                start = call.kv.length
                pieces.append(Piece(call.ids[start : start + count], call.kv))
                calls.append(call)
        return pieces, calls

    def _admit(self) -> None:
        if self._when_idle:
            return
        held_back: list[Call] = []
        while self.waiting and len(self.running) < self.limits.max_batch:
            call = self.waiting.popleft()
            if call.params.max_new_tokens == 0:
                self._end(call, {"type": "length", "length": 0})
                continue
            cached, kv = self._cache.longest(call.salt, call.ids)
            shared, source = self._shared(call)
            if shared > cached + WORTH_WAITING and source is not None and _held(source) < shared:
                held_back.append(call)  # it is being computed right now: take it from there in a step or two
                continue
            if source is not None and source.kv is not None and min(_held(source), shared) > cached:
                cached = min(_held(source), shared)
                kv = source.kv.prefix(cached)
            if not self._fits(call):
                self.waiting.appendleft(call)
                break
            if not call.retractions:
                call.cached_tokens = cached
            call.kv = kv or SequenceKV()
            self.running.append(call)
        self.waiting.extendleft(reversed(held_back))

    def _shared(self, call: Call) -> tuple[int, Call | None]:
        """The most leading tokens that a running call of the same salt has in common with `call`, and that call."""
        best: tuple[int, Call | None] = (0, None)
        for other in self.running:
            if other.salt == call.salt:
                count = min(common_prefix(other.ids, call.ids), call.length - 1)
                if count > best[0]:
                    best = (count, other)
        return best

    def _fits(self, call: Call) -> bool:
        """Whether there is room for the call and some output; the cache gives way. One call alone always fits."""
        left = call.params.max_new_tokens - (call.length - call.prompt_tokens)
        needed = call.length + min(left, _RESERVE) + self._capacity()
        if self.running and needed > self.limits.kv_tokens:
            return False
        self._cache.shrink(max(0, self.limits.kv_tokens - needed))
        return True

    def _capacity(self) -> int:
        return sum(max(c.length, c.kv.capacity if c.kv is not None else 0) for c in self.running)

    def _make_room(self) -> None:
        """Calls that grew past what was reserved: the cache gives way, then the newest calls wait again."""
        while len(self.running) > 1 and self._capacity() > self.limits.kv_tokens:
            self._cache.shrink(0)
            newest = self.running.pop()
            self._retract(newest, keep=False)
        self._cache.shrink(max(0, self.limits.kv_tokens - self._capacity()))

    def _retract(self, call: Call, *, keep: bool = True) -> None:
        """Back to the head of the queue. The caller takes it out of `running`."""
        if keep and call.kv is not None:
            self._cache.add(call.salt, call.ids, call.kv)
        call.kv = None
        call.retractions += 1
        self.waiting.appendleft(call)

    def _abort(self, which: Callable[[Call], bool]) -> None:
        for call in [call for call in self.running if which(call)]:
            self.running.remove(call)
            self._end(call, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
        for call in [call for call in self.waiting if which(call)]:
            self.waiting.remove(call)
            message = "Aborted" if call.retractions else "Abort in waiting queue"
            self._end(call, {"type": "abort", "message": message, "status_code": None, "err_type": None})

    def _end(self, call: Call, finish: dict[str, Any]) -> None:
        if call.kv is not None:
            self._cache.add(call.salt, call.ids.copy(), call.kv)
            call.kv = None
        self._live.discard(call.rid)
        if self._journal is not None:
            self._journal.write(call, finish)
        call.deliver(Update(call.length - call.prompt_tokens, finish))

    def _fail(self, message: str) -> None:
        self._cache.clear()
        for call in self.running:
            self._live.discard(call.rid)
            count = call.length - call.prompt_tokens
            call.deliver(Update(count, {"type": "error", "message": message, "status_code": 500, "err_type": None}))
        self.running.clear()


def _held(call: Call) -> int:
    return call.kv.length if call.kv is not None else 0


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # carried to whoever asked
        future.set_exception(error)


def eos_ids(configs: Iterable[Any]) -> frozenset[int]:
    """The ids that end a reply, out of a model's configuration and its generation configuration."""
    found: set[int] = set()
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            found.update(np.atleast_1d(np.asarray(value, dtype=np.int64)).tolist())
    return frozenset(int(token) for token in found)
