"""A run's folder, followed as it grows: what the page's first level shows."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.viewer.rows import ExecutionRow
from gyre_sdk.viewer.training import Trained, TrainingFiles
from gyre_sdk.wire import WalReader

LOG_NAME = "wal.gyre"
MAX_STEPS = 5000
"""Steps that the plots show, the latest ones."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RunData:
    """Kept up to date by `update`. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.rows: dict[str, ExecutionRow] = {}
        self.training = TrainingFiles(run_dir)
        self.stamp = 0
        """Grows whenever something changed."""
        self._stamps: dict[str, int] = {}
        self._lock = threading.RLock()

    def log(self, execution: str) -> Path | None:
        """The log of an execution of this run; None for any other name, whatever it holds."""
        if not _NAME.fullmatch(execution):
            return None
        path = self.run_dir / "executions" / execution / LOG_NAME
        return path if path.is_file() else None

    def trained(self, execution: str) -> Trained:
        """What training took of an execution."""
        with self._lock:
            row = self.rows.get(execution)
            group = "" if row is None or row.opened is None else row.opened.group
            return self.training.trained(execution, group)

    def update(self) -> int:
        """Read what is new; returns the stamp, which differs from the last one when anything is."""
        with self._lock:
            for path in sorted((self.run_dir / "executions").glob(f"*/{LOG_NAME}")):
                name = path.parent.name
                if name not in self.rows and _NAME.fullmatch(name):
                    self.rows[name] = ExecutionRow(WalReader(path))
            changed = [name for name, row in self.rows.items() if row.outcome is None and row.update()]
            training = self.training.update()
            if changed or training:
                self.stamp += 1
                self._stamps.update(dict.fromkeys(changed, self.stamp))
            return self.stamp

    def page(self, since: int = 0, steps_from: int = 0) -> dict[str, Any]:
        """What the first level shows: of the executions those that changed after stamp `since`, of the steps those from
        number `steps_from` on.
        """
        with self._lock:
            info = read_json(self.run_dir / "run.json")
            names = [name for name, stamp in self._stamps.items() if stamp > since]
            opened = [row.opened.at for row in self.rows.values() if row.opened is not None]
            now = self._now()
            known = len(self.training.steps.rows)
            first = 0 if steps_from > known else max(steps_from, known - MAX_STEPS)
            return {
                "name": self.run_dir.name,
                "stamp": self.stamp,
                "now": round(now, 3),
                "kind": str(info.get("kind", "")),
                "model": Path(str(info.get("model", ""))).name,
                "harness": str(info.get("harness", "")),
                "executions": [row for name in names if (row := self.rows[name].row()) is not None],
                "steps_from": first,
                "steps": self.training.step_rows(first),
                "cells": self.training.cells(self.rows.values(), min(opened, default=0.0), now),
                "events": self.training.events.rows[-200:],
            }

    def _now(self) -> float:
        """The end of the timeline: the present while anything runs, else the last thing that happened."""
        ends = [row.ended_at for row in self.rows.values() if row.ended_at is not None]
        ends += [at for row in self.training.events.rows[-1:] if isinstance(at := row.get("at"), (int, float))]
        running = [row for row in self.rows.values() if row.opened is not None and row.outcome is None]
        if not running and ends:
            return max(ends)
        if all(_silent(row) for row in running) and ends:
            return max([*ends, *(row.path.stat().st_mtime for row in running)])
        return time.time()


def _silent(row: ExecutionRow) -> bool:
    """Nothing was written for so long that the run must be over: it was killed."""
    try:
        return time.time() - row.path.stat().st_mtime > 3600
    except OSError:
        return True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when it can't be read as one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
