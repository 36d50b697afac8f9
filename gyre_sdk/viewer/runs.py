"""A run's executions as rows for the table and the timeline, read from the logs as they grow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire import WalReader
from gyre_sdk.wire.records import Event, Failed, Intent, Opened, Record, Result, Sealed


@dataclass(slots=True)
class ExecutionRow:
    """One execution, folded from its log without building its graph."""

    reader: WalReader
    opened: Opened | None = None
    sealed: Sealed | None = None
    calls: int = 0
    tokens: int = 0
    """Tokens recorded: what prompts added, and what was sampled."""
    sampled: int = 0
    spans: dict[int, list[float | None]] = field(default_factory=dict)
    """Call -> [start, end], seconds since the epoch."""
    moves: list[float] = field(default_factory=list)
    extended: set[int] = field(default_factory=set)
    """Calls whose reply another call's prompt goes on from."""
    lengths: dict[int, int] = field(default_factory=dict)
    damage: str = ""

    def update(self) -> bool:
        """Take what was added to the log since the last time; True when something was."""
        before = self.reader.offset
        try:
            for frame in self.reader.frames():
                self._take(frame.record())
        except (CorruptRecordError, OSError) as error:
            self.damage = str(error)
        return self.reader.offset != before

    def _take(self, record: Record) -> None:
        match record:
            case Opened():
                self.opened = record
            case Intent():
                self.calls += 1
                self.tokens += len(record.delta) // 4
                self.lengths[record.call] = record.base_len + len(record.delta) // 4
                self.spans[record.call] = [record.at, None]
                if record.base_call >= 0 and record.base_len > self.lengths.get(record.base_call, 0):
                    self.extended.add(record.base_call)
            case Result() | Failed():
                self.tokens += len(record.ids) // 4
                self.sampled += len(record.ids) // 4
                self.spans.setdefault(record.call, [record.at, None])[1] = record.at
            case Event(name="moved"):
                self.moves.append(record.at)
            case Sealed():
                self.sealed = record

    def row(self) -> dict[str, Any]:
        """For the page. Raises AssertionError without a first record."""
        assert self.opened is not None
        opened, outcome = self.opened, self.sealed.outcome if self.sealed else None
        return {
            "id": opened.execution,
            "task": opened.task,
            "group": opened.group,
            "opened": opened.at,
            "deadline": None if opened.deadline_s is None else opened.at + opened.deadline_s,
            "sealed": None if self.sealed is None else self.sealed.at,
            "status": "" if outcome is None else outcome.status,
            "reward": None if outcome is None else outcome.reward,
            "valid": outcome is not None and outcome.valid,
            "failure": None if outcome is None else outcome.failure,
            "message": self.damage or ("" if outcome is None else outcome.message),
            "calls": self.calls,
            "branches": len(set(self.spans) - self.extended),
            "tokens": self.tokens,
            "sampled": self.sampled,
            "spans": [span for _, span in sorted(self.spans.items())][-400:],
            "moves": self.moves[-100:],
        }


class RunData:
    """A run's folder, kept up to date by `update`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.rows: dict[str, ExecutionRow] = {}
        self._steps: tuple[int, list[dict[str, Any]]] = (0, [])

    def log(self, execution: str) -> Path | None:
        """The log of an execution of this run; None for any other name, whatever it holds."""
        row = self.rows.get(execution)
        return None if row is None else row.reader.path

    def update(self) -> list[str]:
        """Read what is new; the executions that changed."""
        for path in (self.run_dir / "executions").glob("*/wal.gyre"):
            if path.parent.name not in self.rows:
                self.rows[path.parent.name] = ExecutionRow(WalReader(path))
        return [name for name, row in self.rows.items() if row.sealed is None and row.update()]

    def page(self) -> dict[str, Any]:
        """Everything the first level shows."""
        info = _json(self.run_dir / "run.json", {})
        return {
            "name": self.run_dir.name,
            "kind": info.get("kind", ""),
            "model": Path(str(info.get("model", ""))).name,
            "harness": info.get("harness", ""),
            "executions": [row.row() for _, row in sorted(self.rows.items()) if row.opened is not None],
            "steps": self.steps(),
            "cells": self.cells(),
        }

    def steps(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, as they are."""
        path = self.run_dir / "metrics.jsonl"
        size = path.stat().st_size if path.is_file() else 0
        if size != self._steps[0]:
            self._steps = (size, _json_lines(path))
        return self._steps[1]

    def cells(self) -> list[dict[str, Any]]:
        """Roles of cells over time, from the moves in events.jsonl."""
        roles: dict[str, list[list[Any]]] = {}
        opened = [row.opened.at for row in self.rows.values() if row.opened is not None]
        begun = min(opened, default=0.0)
        for event in _json_lines(self.run_dir / "events.jsonl"):
            words = {"rollout to training": "training", "training to rollout": "rollout", "cell back": "rollout"}
            role = words.get(str(event.get("event")))
            if role is None or "cell" not in event:
                continue
            line = roles.setdefault(str(event["cell"]), [[begun, None, "rollout"]])
            line[-1][1] = event["at"]
            line.append([event["at"], None, role])
        return [{"name": name, "roles": line, "idle": 0.0} for name, line in sorted(roles.items())]


def _json(path: Path, default: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return default


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            continue  # a line that is being written
    return rows
