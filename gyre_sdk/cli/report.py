"""The closing tables of a run: rewards per task, and the three indicators that decide whether elastic cells would pay."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gyre_sdk.cli.live import reward_bars
from gyre_sdk.harness.pool import Finished
from gyre_sdk.harness.records import ExecutionSummary, summaries
from gyre_sdk.wire.records import Outcome

CROWDED = 0.95
"""An execution is crowding its limit when it used this share of it."""


def reward_table(outcomes: Iterable[tuple[str, Outcome]]) -> Table:
    """One row a task: how many ended how, and the rewards of the valid ones."""
    by_task: dict[str, list[Outcome]] = defaultdict(list)
    for task, outcome in outcomes:
        by_task[task].append(outcome)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("task", "executions", "valid", "timeouts", "mean", "best", "rewards 0..1"):
        table.add_column(column, justify="left" if column in ("task", "rewards 0..1") else "right")
    for task, ended in sorted(by_task.items()):
        rewards = [o.reward for o in ended if o.valid and o.reward is not None]
        table.add_row(
            task,
            str(len(ended)),
            str(len(rewards)),
            str(sum(o.status == "timeout" for o in ended)),
            f"{statistics.fmean(rewards):.3f}" if rewards else "-",
            f"{max(rewards):.3f}" if rewards else "-",
            f"|{reward_bars(rewards)}|",
        )
    return table


def indicators(runs: Sequence[ExecutionSummary]) -> list[tuple[str, str]]:
    """What decides whether elastic cells pay: the tail, the crowding at the limit, the time spent outside the engine."""
    ended = [
        one for one in runs if one.wall_s is not None and one.outcome is not None and one.outcome.status != "cancelled"
    ]
    if not ended:
        return []
    longest: dict[str, float] = {}
    for one in ended:
        group = one.opened.group or one.execution
        longest[group] = max(longest.get(group, 0.0), one.wall_s or 0.0)
    walls = sorted(one.wall_s or 0.0 for one in ended)
    typical = statistics.median(walls)
    limited = [one for one in ended if one.opened.deadline_s]
    crowded = sum((one.wall_s or 0.0) >= CROWDED * (one.opened.deadline_s or 0.0) for one in limited)
    total = sum(walls)
    engine = sum(one.engine_s for one in ended)
    tail = f"{statistics.median(longest.values()):.1f} s median, {max(longest.values()):.1f} s longest; an execution {typical:.1f} s"
    return [
        ("slowest of each group", tail),
        ("crowding at the limit", f"{crowded} of {len(limited)} used {CROWDED:.0%} of their time"),
        ("time waiting for the engine", f"{engine / total:.0%} of {total:.0f} s" if total else "-"),
    ]


def print_report(console: Console, run_dir: Path, finished: Sequence[Finished]) -> None:
    """Rewards, indicators, where the run lies, and what to type next."""
    console.print(reward_table((one.order.task.name, one.outcome) for one in finished))
    runs = list(summaries(run_dir))
    for name, value in indicators(runs):
        console.print(f"[dim]{name:<28}[/] {value}", highlight=False)
    reasons = sorted({one.outcome.message for one in finished if not one.outcome.valid and one.outcome.message})
    for reason in reasons[:5]:
        console.print(f"invalid: {reason}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"recorded in {run_dir}", highlight=False, markup=False, soft_wrap=True)
    if runs:
        console.print(f"next: gyre graph {run_dir}", highlight=False, markup=False, soft_wrap=True)
