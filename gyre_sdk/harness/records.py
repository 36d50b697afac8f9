"""Reading a run folder: which executions it holds and how they ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire import WalReader
from gyre_sdk.wire.records import Delivered, Failed, Intent, Opened, Outcome, Result, Sealed

_OURS = ("EngineError", "EngineGoneError", "StorageError")
"""Failures of a call that are not the doing of whoever asked."""


@dataclass(slots=True)
class ExecutionSummary:
    """What a WAL says of an execution, without building its graph."""

    execution: str
    opened: Opened
    path: Path
    calls: int = 0
    results: int = 0
    failed: int = 0
    undelivered: int = 0
    sampled_tokens: int = 0
    engine_s: float = 0.0
    """Seconds spent waiting for the engine, summed over calls."""
    ended_at: float | None = None
    outcome: Outcome | None = None
    """None while it runs, or when it was killed before it could be sealed."""
    damage: str = ""

    @property
    def wall_s(self) -> float | None:
        """From its first to its last record, in seconds; None when it was never sealed."""
        return None if self.ended_at is None else self.ended_at - self.opened.at


def wal_paths(run_dir: Path) -> list[Path]:
    """The WALs of a run, by execution id."""
    return sorted(path for path in (run_dir / "executions").glob("*/wal.gyre") if path.is_file())


def summarise(path: Path) -> ExecutionSummary | None:
    """Fold a WAL into its summary; None for one without a first record. Damage is noted, not raised."""
    summary: ExecutionSummary | None = None
    started: dict[int, float] = {}
    delivered: set[int] = set()
    try:
        for frame in WalReader(path).frames():
            record = frame.record()
            if isinstance(record, Opened):
                summary = ExecutionSummary(record.execution, record, path)
            if summary is None:
                return None
            if isinstance(record, Intent):
                summary.calls += 1
                started[record.call] = record.at
            elif isinstance(record, Result):
                summary.results += 1
                summary.sampled_tokens += len(record.ids) // 4
                summary.engine_s += max(0.0, record.at - started.get(record.call, record.at))
            elif isinstance(record, Failed):
                summary.failed += 1
            elif isinstance(record, Delivered) and record.complete:
                delivered.add(record.call)
            elif isinstance(record, Sealed):
                summary.ended_at, summary.outcome = record.at, record.outcome
    except CorruptRecordError as error:
        if summary is None:
            return None
        summary.damage = str(error)
    if summary is not None:
        summary.undelivered = summary.results - len(delivered)
    return summary


def trouble_with_calls(path: Path, since: float) -> str:
    """Why an agent that ended with an error since then may not be to blame: it never got a reply, or the engine failed its last call."""
    answered, failed = 0, ""
    with contextlib.suppress(CorruptRecordError, FileNotFoundError):
        for frame in WalReader(path).frames():
            record = frame.record()
            if isinstance(record, Result) and record.at >= since:
                answered, failed = answered + 1, ""
            elif isinstance(record, Failed) and record.at >= since:
                failed = record.error if record.error.startswith(_OURS) else ""
    if failed:
        return f"its last call failed: {failed}"
    return "" if answered else "it got no reply before"


def summaries(run_dir: Path) -> Iterator[ExecutionSummary]:
    """Every execution of a run that has a first record."""
    for path in wal_paths(run_dir):
        summary = summarise(path)
        if summary is not None:
            yield summary


def sealed_outcomes(run_dir: Path) -> dict[str, Outcome]:
    """Execution id -> outcome, for those that ended in their own right (a cancelled one is run again)."""
    return {
        one.execution: one.outcome
        for one in summaries(run_dir)
        if one.outcome is not None and one.outcome.status != "cancelled"
    }
