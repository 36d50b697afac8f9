"""Which engine takes a call: pure bookkeeping over engines, sessions and prefixes; no I/O, no clock."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 65_536
"""Sessions and prefixes kept for affinity, least recently used out."""
PREFIX_TOKENS = 128
SLACK = 2
"""Calls by which an engine that holds the prefix may be busier than the least busy one."""


@dataclass(eq=False, slots=True)
class EngineState:
    """One engine as the router knows it."""

    name: str
    url: str
    slots: int
    """Calls it is given at a time."""
    version: str = ""
    draining: bool = False
    suspect: bool = False
    """It failed a call; it gets no more until it answers /ready."""
    calls: set[Any] = field(default_factory=set)
    """Relays that run on it, or have a place reserved on it."""

    @property
    def open(self) -> bool:
        """Whether it may be given calls at all."""
        return not self.draining and not self.suspect

    @property
    def free(self) -> int:
        """Calls it could take now."""
        return self.slots - len(self.calls) if self.open else 0


class Placement:
    """Affinity first, then prefix, then load; a moved call goes where it can stay longest."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineState] = {}
        self.stay: dict[str, float] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefixes: OrderedDict[int, str] = OrderedDict()

    def choose(self, session: str, ids: Sequence[int], *, moved: bool, avoid: Iterable[str] = ()) -> EngineState | None:
        """An engine with a free place, or None. The choice is remembered by `settled`, not here."""
        free = [e for e in self.engines.values() if e.free > 0 and e.name not in avoid]
        if not free:
            return None
        if moved:
            return max(free, key=lambda e: (self.expected_stay(e.name), e.free, e.name))
        least = max(free, key=lambda e: (e.free / e.slots, self.expected_stay(e.name), e.name))
        home = self._sessions.get(session)
        for engine in free:
            if engine.name == home:
                return engine
        shared = self._prefixes.get(_prefix(ids))
        for engine in free:
            if engine.name == shared and len(engine.calls) <= len(least.calls) + SLACK:
                return engine
        return least

    def settled(self, session: str, ids: Sequence[int], engine: EngineState) -> None:
        """The call runs there: its session and prefix are at home there from now on."""
        if session:
            _remember(self._sessions, session, engine.name)
        _remember(self._prefixes, _prefix(ids), engine.name)

    def expected_stay(self, name: str) -> tuple[float, int]:
        """How long the engine is expected to stay in rollout: as told, else by number, as cells leave in that order."""
        number = re.search(r"(\d+)$", name)
        return self.stay.get(name, 0.0), int(number.group(1)) if number else 0

    def others_open(self, name: str) -> bool:
        """Whether any other engine takes calls, now or once a place is free."""
        return any(engine.open for engine in self.engines.values() if engine.name != name)


def _prefix(ids: Sequence[int]) -> int:
    return hash(tuple(ids[:PREFIX_TOKENS]))


def _remember(book: OrderedDict[Any, str], key: object, name: str) -> None:
    book[key] = name
    book.move_to_end(key)
    if len(book) > REMEMBERED:
        book.popitem(last=False)
