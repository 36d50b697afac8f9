"""One execution as a row of the table and a lane of the timeline, folded from its log without building its graph.

Only the fields that a row needs are decoded: requests and replies, most of a log's bytes, are skipped.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire import WalReader
from gyre_sdk.wire.codec import Frame, iter_frames
from gyre_sdk.wire.files import FILE_HEADER_BYTES, check_file_header
from gyre_sdk.wire.records import VERSION, Event, Link, Opened, Outcome, Sealed, Span

SPANS = 400
"""Calls of an execution that the timeline shows, the latest ones."""


WHOLE = 32 * 2**20
"""Bytes up to which a log is read in one piece."""


class _Intent(msgspec.Struct, frozen=True, tag="intent"):
    call: int
    at: float
    base_call: int = -1
    base_len: int = 0
    delta: bytes = b""
    rerender: str = ""


class _Result(msgspec.Struct, frozen=True, tag="result"):
    call: int
    at: float
    ids: bytes
    versions: tuple[Span, ...] = ()
    engine: str = ""


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    call: int
    at: float
    ids: bytes = b""


class _Partial(msgspec.Struct, frozen=True, tag="partial"):
    call: int


class _Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    call: int


class _Labelled(msgspec.Struct, frozen=True, tag="labelled"):
    call: int


_Light = Opened | _Intent | _Result | _Failed | _Partial | _Delivered | _Labelled | Link | Event | Sealed
_decoder: msgspec.msgpack.Decoder[_Light] = msgspec.msgpack.Decoder(_Light)


@dataclass(slots=True)
class _CallSpan:
    start: float
    end: float | None = None
    engine: str = ""
    moved: bool = False
    """It ran on another engine than the call that ended before it."""
    failed: bool = False
    tokens: int = 0
    """Sampled by it."""


@dataclass(slots=True)
class ExecutionRow:
    """What the first level shows of an execution. `update` follows the log as it grows."""

    reader: WalReader
    opened: Opened | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    tokens: int = 0
    """Tokens recorded: what prompts added, and what was sampled."""
    sampled: int = 0
    spans: dict[int, _CallSpan] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    """Typed edges by kind."""
    oldest: int | None = None
    """Oldest and newest policy version that sampled anything here."""
    newest: int | None = None
    damage: str = ""
    _lengths: dict[int, int] = field(default_factory=dict)
    _extended: set[int] = field(default_factory=set)
    _engine: str = ""
    _done: int = 0

    @property
    def path(self) -> Path:
        """Its log."""
        return self.reader.path

    def update(self) -> bool:
        """Take what was added to the log since the last time; True when something was."""
        before = (self.reader.offset, self.damage)
        try:
            self._read_whole()
            for frame in self.reader.frames():
                self._take(self._record(frame))
        except (CorruptRecordError, msgspec.MsgspecError, OSError) as error:
            self.damage = str(error)
        return (self.reader.offset, self.damage) != before

    def _read_whole(self) -> None:
        """The first reading of a log that is not too long: all of it at once, in half the reader's time. It stops where
        anything is odd; the reader then says what it is.
        """
        reader = self.reader
        if reader.offset or reader.path.stat().st_size > WHOLE:
            return
        data = reader.path.read_bytes()
        if len(data) < FILE_HEADER_BYTES:
            return
        check_file_header(data)
        reader.offset = FILE_HEADER_BYTES
        with contextlib.suppress(CorruptRecordError):
            for frame in iter_frames(data, FILE_HEADER_BYTES):
                if frame.seq != reader.next_seq:
                    break
                self._take(self._record(frame))
                reader.offset, reader.next_seq = frame.end, frame.seq + 1

    def _record(self, frame: Frame) -> _Light:
        if frame.version > VERSION:
            raise CorruptRecordError(f"records of version {frame.version} were written by a newer Gyre")
        return _decoder.decode(frame.payload)

    def _take(self, record: _Light) -> None:
        match record:
            case Opened():
                self.opened = record
            case _Intent():
                self._begin(record)
            case _Result() | _Failed():
                self._end(record)
            case Link():
                self.kinds[record.kind] = self.kinds.get(record.kind, 0) + 1
            case Event():
                self.events.append((record.at, record.name))
            case Sealed():
                self.ended_at, self.outcome = record.at, record.outcome

    def _begin(self, record: _Intent) -> None:
        added = len(record.delta) // 4
        self.tokens += added
        self.spans[record.call] = _CallSpan(record.at)
        self._lengths[record.call] = record.base_len + added
        if record.rerender:
            self.kinds["rerenders"] = self.kinds.get("rerenders", 0) + 1
        if record.base_call >= 0 and record.base_len > self._lengths.get(record.base_call, 0):
            self._extended.add(record.base_call)

    def _end(self, record: _Result | _Failed) -> None:
        count = len(record.ids) // 4
        span = self.spans.setdefault(record.call, _CallSpan(record.at))
        span.end = record.at
        if isinstance(record, _Failed):
            span.failed = True
            return
        self._done += 1
        self.tokens += count
        self.sampled += count
        span.engine, span.tokens = record.engine, count
        # A reply that was moved in mid-sampling carries the name of the engine that finished it.
        span.moved = bool(self._engine) and record.engine != self._engine
        self._engine = record.engine
        for version in record.versions:
            self.oldest = version.version if self.oldest is None else min(self.oldest, version.version)
            self.newest = version.version if self.newest is None else max(self.newest, version.version)

    def row(self) -> dict[str, Any] | None:
        """For the page; None without a first record. Times are seconds since the epoch, spans seconds since `opened`."""
        opened, outcome = self.opened, self.outcome
        if opened is None:
            return None
        zero = opened.at
        last = [span for _, span in sorted(self.spans.items())][-SPANS:]
        return {
            "id": self.path.parent.name,
            "task": opened.task,
            "group": opened.group,
            "opened": round(zero, 3),
            "deadline": None if opened.deadline_s is None else round(opened.deadline_s, 2),
            "ended": None if self.ended_at is None else round(self.ended_at, 3),
            "status": "" if outcome is None else outcome.status,
            "reward": None if outcome is None else outcome.reward,
            "valid": outcome is not None and outcome.valid,
            "failure": None if outcome is None else outcome.failure,
            "message": (self.damage or ("" if outcome is None else outcome.message))[:300],
            "calls": len(self.spans),
            "branches": self._done - len(self._extended),
            "tokens": self.tokens,
            "sampled": self.sampled,
            "kinds": self.kinds,
            "versions": None if self.oldest is None else [self.oldest, self.newest],
            "spans": [_compact(span, zero) for span in last],
            "events": [[round(at - zero, 2), name] for at, name in self.events[-50:]],
        }


def _compact(span: _CallSpan, zero: float) -> list[float | int | None]:
    flag = 1 if span.moved else 2 if span.failed else 0
    end = None if span.end is None else round(span.end - zero, 2)
    return [round(span.start - zero, 2), end, flag]
