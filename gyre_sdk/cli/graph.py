"""`gyre graph`: an execution's branch graph in the terminal, or a run's executions to choose from."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre_sdk.cli.live import outcome_word
from gyre_sdk.cli.runs import find_runs, is_run, latest_run, runs_root
from gyre_sdk.errors import ConfigError
from gyre_sdk.graph.loading import find_log, load_graph
from gyre_sdk.graph.render import clean, render_graph
from gyre_sdk.harness.records import summaries


def graph(target: str = "", *, why: bool = False) -> int:
    """Print an execution's branch graph: roles, edge kinds, token counts, reward.

    Parameters
    ----------
    target
        An execution's id (or its beginning), its folder, its log, or a run's folder. A run, and nothing at all for
        the newest run, lists its executions.
    why
        Add a table of all branches with the reason each exists and what it cost in tokens.
    """
    console = Console()
    log = find_target(target)
    if log.is_dir():
        console.print(_executions(log))
        console.print("next: gyre graph EXECUTION [--why]", style="dim")
        return 0
    loaded = load_graph(log)
    console.print(render_graph(loaded.graph, why=why, problem=loaded.problem))
    return 0


def find_target(target: str) -> Path:
    """The log that is meant, or a run's folder. Raises ConfigError."""
    if not target:
        return latest_run()
    path = Path(target)
    if path.is_file():
        return path
    if (path / "wal.gyre").is_file():
        return path / "wal.gyre"
    if path.is_dir():
        if is_run(path):
            return path
        raise ConfigError(f"{path} is neither a run's folder nor an execution's")
    problem: ConfigError | None = None
    for run in reversed(find_runs(runs_root(None))):
        try:
            return find_log(run, target)
        except ConfigError as error:
            if "not unique" in str(error):
                problem = error
    raise problem or ConfigError(
        f"no execution {target!r} in the runs under {runs_root(None)}; `gyre graph` lists some"
    )


def _executions(run: Path) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=f"{run}", title_justify="left")
    for column in ("execution", "group", "task", "calls", "sampled tokens", "outcome", "note"):
        # An id is typed again, so it is never cut.
        table.add_column(
            column, no_wrap=column == "execution", overflow="fold" if column == "execution" else "ellipsis"
        )
    for one in summaries(run):
        outcome = "running or killed" if one.outcome is None else outcome_word(one.outcome)
        note = one.damage or (one.outcome.message if one.outcome is not None else "")
        table.add_row(
            one.execution,
            clean(one.opened.group, 30),
            clean(one.opened.task, 30),
            str(one.calls),
            str(one.sampled_tokens),
            outcome,
            Text(clean(note, 60)),
        )
    return table
