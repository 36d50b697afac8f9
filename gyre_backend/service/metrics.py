"""What a run reports: one JSON line per optimizer step, events of cells, and Prometheus text of the
present.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_backend.monitors import FanOut, flat_numbers
from gyre_backend.service.steps import OpenStep
from gyre_backend.trainers.base import MicroStepResult, StepResult, merge_metrics
from gyre_sdk.wire.prometheus import families, to_text


class Metrics:
    """Writes `metrics.jsonl` (steps), `events.jsonl` (moves, losses) and `selection.jsonl` (what is trained of each group),
    line by line.
    """

    def __init__(self, run_dir: Path, monitors: FanOut | None = None) -> None:
        self._monitors = monitors or FanOut({})
        self._steps = run_dir / "metrics.jsonl"
        self._events = run_dir / "events.jsonl"
        self._selection = run_dir / "selection.jsonl"
        for path in (self._events, self._selection):
            _cut_torn_end(path)
        self.last: dict[str, Any] = {}
        self.counters: dict[str, float] = {}

    def step(self, row: Mapping[str, Any]) -> None:
        """One finished step."""
        self.last = dict(row)
        _append(self._steps, row)
        self._monitors.step(row)

    def event(self, name: str, **data: Any) -> None:
        """Something that happened to cells; counted by name."""
        self.count(name)
        _append(self._events, {"at": round(time.time(), 3), "event": name, **data})

    def selection(self, group: str, paths: Sequence[Mapping[str, Any]]) -> None:
        """What was taken of a group; a later line of the same group replaces it."""
        _append(self._selection, {"group": group, "at": round(time.time(), 3), "paths": list(paths)})

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + by

    def rewind(self, committed: Sequence[Mapping[str, Any]]) -> None:
        """After a restart: exactly the lines of the steps that the ledger has, in order.

        Lines of steps that no checkpoint holds go, so does one that a kill cut; one that it left unwritten comes from the ledger.
        """
        written = {row["policy_version"]: row for row in _read(self._steps)}
        rows = [written.get(row["policy_version"], dict(row)) for row in committed]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if self._steps.is_file() and self._steps.read_text() == text:
            pass
        elif rows or self._steps.is_file():
            temporary = self._steps.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(self._steps)
        self.last = rows[-1] if rows else {}

    def prometheus(self, gauges: Mapping[str, float]) -> str:
        """Text format 0.0.4: gauges of the present, the last step's numbers, counters."""
        last = flat_numbers(self.last)
        return to_text([
            *families("gauge", gauges), *families("gauge", last, prefix="last_"), *families("counter", self.counters),
        ])  # fmt: skip

    def close(self) -> None:
        """Let the monitors write what they hold; blocks for some seconds at most."""
        self._monitors.close()


def step_row(step: OpenStep, result: StepResult, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The metrics of one step. Losses are means over executions; staleness is in versions, over trained
    tokens.
    """
    groups = list(step.groups.values())
    results: list[MicroStepResult] = list(step.results.values())
    rewards = [reward for group in groups for reward in group.rewards]
    edges = sum(group.edges for group in groups)
    tokens, flat = sum(g.tokens for g in groups), sum(g.flat_tokens for g in groups)
    staleness = step.step - sum(g.version_sum for g in groups) / edges if edges else 0.0
    counters: dict[str, int] = {}
    for group in groups:
        for name, value in group.counters.items():
            counters[name] = counters.get(name, 0) + value
    return {
        "step": step.step,
        "policy_version": result.version,
        "at": round(time.time(), 3),
        "loss": sum(r.loss for r in results) / result.num_executions,
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "reward_min": min(rewards, default=0.0),
        "reward_max": max(rewards, default=0.0),
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "groups": len(groups),
        "executions": result.num_executions,
        "micro_steps": len(results),
        "unique_tokens": tokens,
        "flat_tokens": flat,
        "sharing": 1.0 - tokens / flat if flat else 0.0,
        "trained_tokens": edges,
        "staleness": staleness,
        "staleness_max": step.step - min((g.oldest_version for g in groups), default=step.step),
        "leases_lost": step.book.lost,
        "gradient_bytes": step.gradient_bytes,
        "cells": _by_cell(step),
        **{f"{name}_seconds": round(value, 4) for name, value in seconds.items()},
        **{f"selection/{name}": value for name, value in counters.items()},
        **merge_metrics(results),
    }


def _by_cell(step: OpenStep) -> dict[str, int]:
    """Micro-steps that count, by the cell that computed them."""
    by_cell: dict[str, int] = {}
    for cell in step.book.owners().values():
        by_cell[cell] = by_cell.get(cell, 0) + 1
    return by_cell


def _read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may have been cut."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _cut_torn_end(path: Path) -> None:
    """What a kill left half written goes, so that the next line stands on its own."""
    if path.is_file() and path.stat().st_size:
        with path.open("r+b") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(dict(row)) + "\n")


def total(values: Iterable[float]) -> float:
    """Sum, for readers of counters."""
    return float(sum(values))
