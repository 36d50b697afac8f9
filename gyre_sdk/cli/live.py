"""The live table of a run: what is running, what was graded, how the rewards lie. Plain lines when there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gyre_sdk.harness.runner import Progress
from gyre_sdk.wire.records import Outcome

_BARS = " ▁▂▃▄▅▆▇█"
RECENT = 8


def reward_bars(rewards: list[float], bins: int = 10) -> str:
    """A histogram over [0, 1] as a line of block characters."""
    counts = [0] * bins
    for reward in rewards:
        counts[min(bins - 1, int(min(1.0, max(0.0, reward)) * bins))] += 1
    top = max(counts, default=0) or 1
    return "".join(_BARS[(count * (len(_BARS) - 1) + top - 1) // top] for count in counts)


def outcome_word(outcome: Outcome) -> str:
    """`0.50`, or why there is no reward."""
    if outcome.valid and outcome.reward is not None:
        late = " (timeout)" if outcome.status == "timeout" else ""
        return f"{outcome.reward:.2f}{late}"
    return f"invalid: {outcome.failure or outcome.status}"


class RunView:
    """Collects progress and draws it."""

    def __init__(self, console: Console, title: str, total: int | None = None) -> None:
        self.console = console
        self.title = title
        self.total = total
        self.started = time.time()
        self.current: dict[str, Progress] = {}
        self.done: list[Progress] = []
        self.header: Callable[[], RenderableType | None] = lambda: None

    def report(self, progress: Progress) -> None:
        """Take one step of an execution."""
        if progress.state == "done":
            self.current.pop(progress.execution, None)
            self.done.append(progress)
        else:
            self.current[progress.execution] = progress
        if not self.console.is_terminal:
            word = f" {outcome_word(progress.outcome)}" if progress.outcome is not None else ""
            since = time.time() - self.started
            self.console.print(f"{since:7.1f} s  {progress.execution}  {progress.task:<24} {progress.state}{word}")

    def note(self, text: str) -> None:
        """A line above the table."""
        self.console.print(text)

    def rewards(self) -> list[float]:
        """Rewards of the valid executions so far."""
        outcomes = [progress.outcome for progress in self.done]
        return [o.reward for o in outcomes if o is not None and o.valid and o.reward is not None]

    def render(self) -> RenderableType:
        """The table as it stands."""
        parts: list[RenderableType] = []
        header = self.header()
        if header is not None:
            parts.append(header)
        parts.append(self._counts())
        if self.current:
            parts.append(self._running())
        if self.done:
            parts.append(self._recent())
        return Group(*parts)

    def _counts(self) -> Text:
        states = Counter(progress.state for progress in self.current.values())
        invalid = sum(1 for p in self.done if p.outcome is not None and not p.outcome.valid)
        of = f"/{self.total}" if self.total is not None else ""
        rewards = self.rewards()
        mean = f"{fmean(rewards):.2f}" if rewards else "-"
        return Text.assemble(
            (f"{self.title}  ", "bold"),
            f"{time.time() - self.started:.0f} s   done {len(self.done)}{of}   running {states['running']}   "
            f"grading {states['grading']}   invalid {invalid}   reward {mean} |{reward_bars(rewards)}|",
        )

    def _running(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("execution", "task", "state", "left"):
            table.add_column(column)
        now = time.time()
        for progress in list(self.current.values())[:16]:
            left = "" if progress.deadline_at is None else f"{max(0.0, progress.deadline_at - now):.0f} s"
            table.add_row(progress.execution, progress.task, progress.state, left)
        return table

    def _recent(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("ended", "task", "reward", "why"):
            table.add_column(column)
        for progress in self.done[-RECENT:]:
            outcome = progress.outcome
            if outcome is not None:
                table.add_row(progress.execution, progress.task, outcome_word(outcome), Text(outcome.message[:80]))
        return table

    @contextmanager
    def live(self) -> Iterator[None]:
        """Redraw twice a second while the block runs, if there is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self.render, console=self.console, refresh_per_second=2, transient=True):
            yield
