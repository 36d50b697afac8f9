"""`gyre plot`: a run's curves and timeline as a picture, or the learning curves of several runs over each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from gyre_sdk.cli.graph import find_target
from gyre_sdk.errors import ConfigError, MissingExtraError
from gyre_sdk.viewer.runs import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = ("reward", "loss", "staleness", "idle_share", "sharing")
"""Panels, in order; `timeline` comes after them."""
_TITLES = {
    "reward": "reward (mean of a step's executions)",
    "loss": "loss",
    "staleness": "staleness (policy versions)",
    "idle_share": "idle share of cells",
    "sharing": "sharing (tokens not computed twice)",
}
_COLOURS = {"rollout": "#4c9f70", "training": "#8e5ea2", "lost": "#c0392b"}
FORMATS = (".png", ".svg", ".pdf")


def plot(
    *runs: str,
    out: Annotated[Path | None, Parameter(alias="-o", help="file to write: .png, .svg or .pdf")] = None,
    smooth: Annotated[int, Parameter(help="steps in the moving mean; 1: none")] = 1,
    against: Annotated[str, Parameter(help="horizontal axis: step, minutes or tokens (trained so far)")] = "step",
) -> int:
    """Draw reward, loss, staleness, idle share, sharing and the timeline of cells' roles. Several runs: overlaid curves.

    Parameters
    ----------
    runs
        Folders of runs; nothing means the newest one.
    out
        Default: RUN/plot.png, or ./runs.png for several.
    """
    folders = [_folder(run) for run in runs or ("",)]
    if smooth < 1 or against not in _AXES:
        raise ConfigError(f"--smooth must be at least 1, and --against one of: {', '.join(_AXES)}")
    target = out or (folders[0] / "plot.png" if len(folders) == 1 else Path("runs.png"))
    if target.suffix not in FORMATS:
        raise ConfigError(f"{target}: the picture's name must end with {', '.join(FORMATS)}")
    data = [RunData(folder) for folder in folders]
    for one in data:
        one.update()
    figure = draw(data, smooth=smooth, against=against)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=130)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror or error}") from error
    Console().print(str(target), highlight=False, markup=False, soft_wrap=True)
    return 0


def _folder(run: str) -> Path:
    found = find_target(run)
    return found if found.is_dir() else found.parents[2]


def draw(runs: Sequence[RunData], *, smooth: int = 1, against: str = "step") -> Figure:
    """The picture. One run: curves and timeline; several: curves, a colour per run. Raises ConfigError when there is nothing
    to draw, MissingExtraError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    alone = len(runs) == 1
    steps = {id(run): step_rows(run) for run in runs}
    panels = [name for name in CURVES if any(points(rows, name, against)[0] for rows in steps.values())]
    timeline = alone and any(row.opened is not None for row in runs[0].rows.values())
    if not panels and not timeline:
        raise ConfigError(f"{runs[0].run_dir} holds no finished step and no execution yet: there is nothing to draw")
    figure = Figure(figsize=(11, 1.9 * len(panels) + (4.2 if timeline else 0) + 0.6), layout="constrained")
    heights = [1.0] * len(panels) + ([2.2] if timeline else [])
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for name, axis in zip(panels, axes):
        for run in runs:
            _curve(axis, steps[id(run)], name, against, smooth, label=run.run_dir.name)
        axis.set_title(_TITLES[name], loc="left", fontsize=9)
        axis.grid(alpha=0.3)
        axis.set_xlabel(against, fontsize=8)
        if against != "minutes":
            axis.xaxis.get_major_locator().set_params(integer=True)
    if timeline:
        _timeline(axes[-1], runs[0])
    if not alone:
        axes[0].legend(fontsize=8)
    figure.suptitle(runs[0].run_dir.name if alone else f"{len(runs)} runs", fontsize=11)
    return figure


_AXES: dict[str, Callable[[Sequence[dict[str, Any]]], list[float]]] = {
    "step": lambda rows: [row["step"] + 1 for row in rows],
    "minutes": lambda rows: [(row["at"] - (rows[0]["at"] - rows[0].get("seconds", 0.0))) / 60 for row in rows],
    "tokens": lambda rows: [float(sum(r.get("trained_tokens", 0) for r in rows[: i + 1])) for i in range(len(rows))],
}


def step_rows(run: RunData) -> list[dict[str, Any]]:
    """The run's steps with `idle_share` filled in: of the time since the step before, the share in which a cell in rollout had
    no call and a cell in training no micro-step, over all cells.
    """
    rows = [dict(row) for row in run.training.steps.rows if isinstance(row.get("step"), int) and "at" in row]
    opened = [row.opened.at for row in run.rows.values() if row.opened is not None]
    if not opened or not rows:
        return rows
    cells = run.training.cells(run.rows.values(), min(opened), rows[-1]["at"])
    busy = {
        cell["name"]: [
            (span.start, span.end if span.end is not None else rows[-1]["at"])
            for row in run.rows.values()
            for span in row.spans.values()
            if span.engine == cell["name"]
        ]
        for cell in cells
    }
    before = min(opened)
    for row in rows:
        if "idle_share" not in row and cells and row["at"] > before:
            row["idle_share"] = _idle_share(row, cells, busy, before)
        before = row["at"]
    return rows


def _idle_share(
    row: dict[str, Any],
    cells: list[dict[str, Any]],
    busy: dict[str, list[tuple[float, float]]],
    before: float,
) -> float:
    at = float(row["at"])
    worked = float(row.get("micro_seconds", 0.0)) + float(row.get("optimizer_seconds", 0.0))
    for cell in cells:
        rollout = [
            (max(start, before), min(at if end is None else end, at))
            for start, end, role in cell["roles"]
            if role == "rollout"
        ]
        edges = sorted((max(a, left), min(b, right)) for a, b in busy[cell["name"]] for left, right in rollout)
        reached = before
        for start, end in edges:
            worked += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    return min(1.0, max(0.0, 1.0 - worked / ((at - before) * len(cells))))


def points(rows: Sequence[dict[str, Any]], name: str, against: str) -> tuple[list[float], list[float]]:
    """(horizontal, vertical) values of a curve; steps without the value are left out."""
    kept = [
        (x, float(row[name])) for x, row in zip(_AXES[against](rows), rows) if isinstance(row.get(name), (int, float))
    ]
    return [x for x, _ in kept], [y for _, y in kept]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and those before it, `width` at most."""
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def _curve(axis: Axes, rows: list[dict[str, Any]], name: str, against: str, smooth: int, label: str) -> None:
    xs, ys = points(rows, name, against)
    if not xs:
        return
    # A label that begins with an underscore would be left out of the legend.
    (line,) = axis.plot(
        xs, moving_mean(ys, smooth), marker="o" if len(xs) < 40 else None, markersize=3, label=label.lstrip("_")
    )
    if smooth > 1:
        axis.plot(xs, ys, color=line.get_color(), alpha=0.25, linewidth=0.8)
    if name == "reward" and all("reward_min" in row and "reward_max" in row for row in rows) and smooth == 1:
        axis.fill_between(
            xs,
            [r["reward_min"] for r in rows],
            [r["reward_max"] for r in rows],
            color=line.get_color(),
            alpha=0.12,
            linewidth=0,
        )


def _timeline(axis: Axes, run: RunData) -> None:
    """Cells' roles above, executions below: a bar each, its calls dark on it."""
    page = run.page()
    lanes = sorted(page["executions"], key=lambda one: (one["opened"], one["id"]))[-200:]
    zero = min(one["opened"] for one in lanes)
    now = page["now"]
    labels: list[str] = []
    for cell in page["cells"]:
        for start, end, role in cell["roles"]:
            width = max(0.0, (now if end is None else end) - start)
            axis.barh(len(labels), width, left=start - zero, height=0.8, color=_COLOURS.get(role, "#999999"))
        labels.append(cell["name"])
    for one in lanes:
        y = len(labels)
        axis.barh(y, (one["ended"] or now) - one["opened"], left=one["opened"] - zero, height=0.7, color="#d5dbe3")
        calls = [
            (one["opened"] - zero + start, (now - one["opened"] if end is None else end) - start)
            for start, end, _ in one["spans"]
        ]
        axis.broken_barh(calls, (y - 0.35, 0.7), color="#3b6ea5")
        labels.append(one["id"][:8] if len(lanes) <= 40 else "")
    axis.set_yticks(range(len(labels)), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlabel("seconds", fontsize=8)
    axis.set_title(
        "cells: rollout green, training purple; executions: calls blue, tools and grading grey", loc="left", fontsize=9
    )
