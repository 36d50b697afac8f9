"""`gyre top`: a run in the terminal while it goes on, or after: executions, cells and their roles, step, reward, tokens per second."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gyre_sdk.cli.graph import find_target
from gyre_sdk.cli.live import reward_bars
from gyre_sdk.errors import ConfigError
from gyre_sdk.graph.render import age, clean
from gyre_sdk.viewer.runs import RunData

WINDOW_S = 60.0
"""Tokens per second are those of so many seconds before now."""
STRIP = 40
"""Columns of a cell's strip of roles."""
_LETTERS = {"rollout": ("█", "green"), "training": ("▒", "magenta"), "lost": ("x", "red")}


def top(
    run: str = "",
    *,
    once: bool = False,
    interval: Annotated[float, Parameter(help="seconds between two looks")] = 1.0,
    rows: Annotated[int, Parameter(help="executions that are shown, the latest first")] = 20,
) -> int:
    """Watch a run: executions, cells and their roles, step, reward, tokens per second. Ctrl-C ends it.

    Parameters
    ----------
    run
        A run's folder; nothing means the newest run. It may be running, over, or killed.
    once
        Print one look and end: for scripts.
    """
    folder = find_target(run)
    if not folder.is_dir():
        folder = folder.parents[2]
    if interval <= 0 or rows < 1:
        raise ConfigError("--interval must be above 0 and --rows at least 1")
    console, data = Console(), RunData(folder)
    if once or not console.is_terminal:
        data.update()
        console.print(render(data, rows))
        return 0
    shown = Text("reading …")

    def look() -> RenderableType:
        data.update()
        return render(data, min(rows, max(1, console.size.height - 12 - len(data.training.events.rows[-1:]))))

    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(look(), refresh=True)
            time.sleep(interval)


def render(data: RunData, rows: int) -> RenderableType:
    """One look at a run whose files were read."""
    page = data.page()
    executions = page["executions"]
    parts: list[RenderableType] = [_head(page), _counts(executions, data)]
    if page["steps"]:
        parts.append(_step(page["steps"]))
    if page["cells"]:
        parts.append(_cells(page["cells"], page["now"]))
    parts.append(_table(executions, page["now"], rows))
    return Group(*parts)


def _head(page: dict[str, Any]) -> Text:
    text = Text(clean(page["name"]), style="bold")
    for name in ("kind", "model", "harness"):
        if page[name]:
            text.append(f"  {name} {clean(page[name], 60)}", style="not bold")
    return text


def _counts(executions: list[dict[str, Any]], data: RunData) -> Text:
    ended = [one for one in executions if one["status"]]
    rewards = [one["reward"] for one in ended if one["valid"] and one["reward"] is not None]
    invalid = sum(not one["valid"] for one in ended)
    mean = f"{fmean(rewards):.3f} |{reward_bars(rewards)}|" if rewards else "-"
    now_rate, whole_rate = token_rates(data)
    in_flight = sum(1 for one in executions if not one["status"] for span in one["spans"] if span[1] is None)
    return Text(
        f"executions {len(executions)}   running {len(executions) - len(ended)}   ended {len(ended)}   invalid {invalid}   "
        f"calls in flight {in_flight}   reward {mean}   tokens/s {now_rate:.1f} now, {whole_rate:.1f} over the run"
    )


def token_rates(data: RunData, now: float | None = None) -> tuple[float, float]:
    """Sampled tokens per second: of the last WINDOW_S, and over the run. A reply counts over the time it took."""
    spans = [
        (span.start, span.end, span.tokens) for row in data.rows.values() for span in row.spans.values() if span.end
    ]
    if not spans:
        return 0.0, 0.0
    now = time.time() if now is None else now
    first, last = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
    total = sum(tokens for _, _, tokens in spans)
    recent = 0.0
    for start, end, tokens in spans:
        inside = min(end, now) - max(start, now - WINDOW_S)
        if inside > 0:
            recent += tokens * min(1.0, inside / max(end - start, 1e-9))
    return recent / WINDOW_S, total / max(last - first, 1e-9)


def _step(steps: list[dict[str, Any]]) -> Text:
    last = steps[-1]
    parts = [f"step {last.get('step', 0) + 1}", f"policy version {last.get('policy_version', 0)}"]
    for name in ("reward", "loss", "grad_norm", "staleness", "sharing", "idle_share"):
        if isinstance(last.get(name), (int, float)):
            parts.append(f"{name} {last[name]:.4g}")
    if isinstance(last.get("seconds"), (int, float)):
        parts.append(f"{last['seconds']:.1f} s")
    rewards = [row["reward"] for row in steps[-30:] if isinstance(row.get("reward"), (int, float))]
    return Text("   ".join(parts) + f"   rewards of steps {spark(rewards)}")


def spark(values: list[float]) -> str:
    """Values as a line of block characters, the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) / (high - low) * 7) if high > low else 3] for value in values)


def _cells(cells: list[dict[str, Any]], now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("cell", "role", "for"):
        table.add_column(column, no_wrap=True)
    for column in ("moves", "idle in rollout", "idle in training"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("roles over time: rollout [green]█[/] training [magenta]▒[/]", no_wrap=True)
    for cell in cells:
        roles = cell["roles"]
        since, _, role = roles[-1]
        shares = [
            "-" if cell.get(key) is None else f"{100 * cell[key]:.0f} %" for key in ("idle_rollout", "idle_training")
        ]
        table.add_row(
            clean(cell["name"], 30), role, age(max(0.0, now - since)), str(len(roles) - 1), *shares, strip(roles, now)
        )
    return table


def strip(roles: list[list[Any]], now: float, columns: int = STRIP) -> Text:
    """A cell's roles over time, one character a column: the role that held longest in it."""
    begun = roles[0][0]
    width = max(now - begun, 1e-9) / columns
    text = Text()
    for column in range(columns):
        left, right = begun + column * width, begun + (column + 1) * width
        held: dict[str, float] = {}
        for start, end, role in roles:
            held[role] = held.get(role, 0.0) + max(0.0, min(right, now if end is None else end) - max(left, start))
        character, style = _LETTERS.get(max(held, key=held.__getitem__), ("?", "yellow"))
        text.append(character, style=style)
    return text


def _table(executions: list[dict[str, Any]], now: float, rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("execution", "group", "task", "state"):
        table.add_column(column, no_wrap=column in ("execution", "state"), overflow="ellipsis")
    for column in ("for", "left", "calls", "branches", "tokens", "sampled", "versions"):
        table.add_column(column, justify="right", no_wrap=True)
    latest = sorted(executions, key=lambda one: (bool(one["status"]), -(one["ended"] or one["opened"]), one["id"]))
    for one in latest[:rows]:
        table.add_row(*_row(one, now))
    if len(latest) > rows:
        table.add_row(Text(f"and {len(latest) - rows} more", style="dim"))
    return table


def _row(one: dict[str, Any], now: float) -> list[RenderableType]:
    end = one["ended"] or now
    left = "" if one["deadline"] is None or one["status"] else age(max(0.0, one["opened"] + one["deadline"] - now))
    versions = one["versions"]
    return [
        Text(clean(one["id"], 40)),
        Text(clean(one["group"], 20)),
        Text(clean(one["task"], 30)),
        _state(one),
        age(max(0.0, end - one["opened"])),
        left,
        str(one["calls"]),
        str(one["branches"]),
        f"{one['tokens']:,}",
        f"{one['sampled']:,}",
        "" if versions is None else "–".join(str(version) for version in sorted(set(versions))),
    ]


def _state(one: dict[str, Any]) -> Text:
    if not one["status"]:
        waiting = any(span[1] is None for span in one["spans"])
        return Text("sampling" if waiting else "tools or grading", style="cyan" if waiting else "yellow")
    if not one["valid"]:
        return Text(f"invalid: {one['failure'] or one['status']}", style="red")
    reward = "no reward" if one["reward"] is None else f"{one['reward']:.2f}"
    late = "" if one["status"] == "completed" else f" ({one['status']})"
    return Text(reward + late, style="green" if one["reward"] else "white")
