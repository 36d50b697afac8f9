"""What a training run wrote beside its executions: steps, cells' moves, and which trajectories were trained.

Files are read as they are (`metrics.jsonl`, `events.jsonl`, `selection.jsonl`, `ledger.sqlite`); the ledger is opened
read-only. All of them may be missing, and all may be growing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.viewer.rows import ExecutionRow

ROLES = {
    "rollout to training": "training",
    "training to rollout": "rollout",
    "cell back": "rollout",
    "cell lost": "lost",
}


class JsonLines:
    """A JSON-lines file that grows; `rows` holds what was read of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._offset = 0

    def update(self) -> bool:
        """Read what is new; True when that was something. A file that became shorter is read anew."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size == self._offset:
            return False
        if size < self._offset:
            self.rows, self._offset = [], 0
        before = len(self.rows)
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                try:
                    self.rows.append(msgspec.json.decode(line, type=dict[str, Any]))
                except msgspec.DecodeError:
                    continue
        return len(self.rows) != before


STEP_FIELDS = (
    "step", "policy_version", "at", "loss", "reward", "reward_min", "reward_max", "grad_norm", "lr", "executions", "groups",
    "unique_tokens", "flat_tokens", "sharing", "trained_tokens", "staleness", "staleness_max", "entropy", "clip_share",
    "ratio_mean", "seconds", "train_seconds", "micro_seconds", "idle_share", "leases_lost",
)  # fmt: skip
"""What is sent of a step's line."""


class Taken(msgspec.Struct, frozen=True):
    """One trained trajectory: a line of `selection.jsonl` holds those of a group."""

    execution: str
    leaf: str
    role: str
    weight: float
    """Of each trained token, before the step's division by the number of executions."""
    advantage: float
    calls: list[tuple[int, int, int]]
    """(call, start, end): output tokens [start, end) of the call are trained through this trajectory."""


class _Selection(msgspec.Struct, frozen=True):
    group: str
    paths: list[Taken]


@dataclass(frozen=True, slots=True)
class Trained:
    """What was taken of one execution, and the step that trained it (None: not yet)."""

    group: str
    step: int | None
    paths: tuple[Taken, ...]


class TrainingFiles:
    """The training side of a run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps = JsonLines(run_dir / "metrics.jsonl")
        self.events = JsonLines(run_dir / "events.jsonl")
        self.selection = JsonLines(run_dir / "selection.jsonl")

    def update(self) -> bool:
        """Read what is new; True when that was something."""
        return any([self.steps.update(), self.events.update(), self.selection.update()])

    def step_rows(self, start: int) -> list[dict[str, Any]]:
        """The lines of steps from `start` on, cut down to what the page plots."""
        return [{name: row[name] for name in STEP_FIELDS if name in row} for row in self.steps.rows[start:]]

    def trained(self, execution: str, group: str) -> Trained:
        """The trajectories of an execution that were taken; the last selection of its group counts."""
        paths: tuple[Taken, ...] = ()
        for row in self.selection.rows:
            if row.get("group") != group:
                continue
            try:
                line = msgspec.convert(row, _Selection)
            except msgspec.ValidationError:
                continue
            paths = tuple(path for path in line.paths if path.execution == execution)
        return Trained(group, self._step_of(group), paths)

    def _step_of(self, group: str) -> int | None:
        path = self.run_dir / "ledger.sqlite"
        if not path.is_file():
            return None
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
                row = db.execute("SELECT step FROM groups WHERE id = ?", (group,)).fetchone()
        except sqlite3.Error:
            return None
        return None if row is None or row[0] is None else int(row[0])

    def cells(self, rows: Iterable[ExecutionRow], begun: float, now: float) -> list[dict[str, Any]]:
        """Each cell's roles over time as [start, end or null, role], with the share of its time it had nothing to do.

        A cell is idle in rollout while no call that it answered is in flight; in training, for what its micro-steps
        leave of the time (their mean length times their number).
        """
        roles: dict[str, list[list[Any]]] = {}
        busy = _busy(rows, now)
        for cell in busy:
            roles[cell] = [[begun, None, "rollout"]]
        for event in self.events.rows:
            role, name, at = ROLES.get(str(event.get("event"))), event.get("cell"), event.get("at")
            if role is None or not isinstance(name, str) or not isinstance(at, (int, float)):
                continue
            line = roles.setdefault(name, [[begun, None, "rollout"]])
            line[-1][1] = float(at)
            line.append([float(at), None, role])
        trained = self._trained_seconds()
        return [
            {"name": name, "roles": line, **_idle(line, busy.get(name, []), trained.get(name, 0.0), now)}
            for name, line in sorted(roles.items())
        ]

    def _trained_seconds(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for row in self.steps.rows:
            cells, total, count = row.get("cells"), row.get("micro_seconds"), row.get("micro_steps")
            if isinstance(cells, dict) and isinstance(total, (int, float)) and count:
                for cell, number in cells.items():
                    seconds[cell] = seconds.get(cell, 0.0) + total * number / count
        return seconds


Interval = tuple[float, float]


def _busy(rows: Iterable[ExecutionRow], now: float) -> dict[str, list[Interval]]:
    """Cell -> the merged intervals in which it answered calls."""
    found: dict[str, list[Interval]] = {}
    for row in rows:
        for span in row.spans.values():
            if span.engine:
                found.setdefault(span.engine, []).append((span.start, now if span.end is None else span.end))
    return {cell: _merged(intervals) for cell, intervals in found.items()}


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _idle(line: list[list[Any]], busy: list[Interval], trained: float, now: float) -> Mapping[str, float | None]:
    rollout = [(start, now if end is None else end) for start, end, role in line if role == "rollout"]
    training = sum((now if end is None else end) - start for start, end, role in line if role == "training")
    total = sum(end - start for start, end in rollout)
    worked = sum(max(0.0, min(b, end) - max(a, start)) for a, b in busy for start, end in rollout)
    return {
        "idle_rollout": round(1 - worked / total, 4) if total > 0 else None,
        "idle_training": round(max(0.0, 1 - trained / training), 4) if training > 0 and trained > 0 else None,
    }
