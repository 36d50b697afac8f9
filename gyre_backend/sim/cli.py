"""`gyre sim` and `gyre forecast`: simulate a cluster before buying it."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gyre_backend.cells.policy import PRESETS
from gyre_backend.sim import timeline
from gyre_backend.sim.costs import Costs
from gyre_backend.sim.forecast import MODES, Forecast, forecast_trace, hours
from gyre_backend.sim.paper import ASSUMPTIONS, report
from gyre_backend.sim.scenario import WARMUP, Scenario, load, parse
from gyre_backend.sim.tuning import Summary, best, candidates, filling, summarize
from gyre_sdk.errors import ConfigError

app = cyclopts.App(
    name="sim",
    help="Simulate a cluster: one run with its role timeline, or a sweep. Drives the production scheduler.",
    result_action="return_value",
)
forecast_app = cyclopts.App(
    name="forecast",
    help="Which scheduler, cells and limits would suit a recorded workload.",
    result_action="return_value",
)


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def _record(summary: Summary) -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(summary, config=None))  # type: ignore[arg-type]
    return {**fields, "config": msgspec.to_builtins(summary.config)}


@app.default
def simulate(
    config: Path,
    *,
    preset: Annotated[tuple[str, ...], Parameter(name="--preset", negative=())] = (),
    seed: int = 0,
    svg: Path | None = None,
    first_step: int = 4,
    show_steps: int = 4,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Simulate one TOML scenario and print who did what when.

    Parameters
    ----------
    config
        The scenario (see docs/forecast.md).
    preset
        Compare these presets instead of the file's scheduler; may be given more than once.
    seed
        Of the workload. The timeline shows this seed; the table averages the file's seeds.
    svg
        Write the timeline as a picture.
    first_step
        First step that the timeline shows.
    show_steps
        How many steps it shows.
    json_file
        Write the summary.
    """
    scenario, policy = load(config)
    chosen = {name: scenario.policy(name, **filling(name, policy.max_staleness, scenario.cells)) for name in preset}
    chosen = chosen or {"scheduler": policy}
    if not 0 <= first_step < scenario.steps or show_steps < 1:
        raise ConfigError(f"--first-step must be below run.steps = {scenario.steps}, and --show-steps at least 1")
    console = Console(highlight=False)
    panels, summaries = [], {}
    with _progress() as progress:
        task = progress.add_task("simulating")
        for name, one in chosen.items():
            one.check_cells(scenario.cells, scenario.standalone)
            progress.update(task, description=f"simulating {name}")
            panels.append((name, scenario.simulate(one, seed)))
            summaries[name] = summarize(scenario, one)
    for name, result in panels:
        console.print(f"[bold]{name}[/]")
        console.print(timeline.text(result, *timeline.window(result, first_step, show_steps)), soft_wrap=True)
    console.print(_table(summaries))
    if svg is not None:
        _write(svg, timeline.svg(panels, first_step, show_steps))
    if json_file is not None:
        _write(json_file, json.dumps({n: _record(s) for n, s in summaries.items()}, indent=1))


def _table(summaries: Mapping[str, Summary], title: str = "") -> Table:
    table = Table(title=title or None)
    table.add_column("", no_wrap=True)
    for name in ("step", "+-", "cut", "stale", "idle", "groups/h", "GPU-h"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, s in summaries.items():
        table.add_row(
            name,
            hours(s.step_s),
            hours(s.step_s_95),
            f"{s.timeout_share:.1%}",
            f"{s.staleness:.2f}<={s.max_staleness}",
            f"{s.idle_share:.1%}",
            f"{s.groups_per_hour:.2f}",
            f"{s.gpu_hours_per_step:.0f}",
        )
    return table


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    table, _, field = key.partition(".")
    if not field:
        raise ConfigError(f"--vary: {key!r} must be TABLE.KEY, such as cluster.cells")
    document.setdefault(table, {})[field] = value


def _axis(text: str) -> tuple[str, list[Any]]:
    key, _, values = text.partition("=")
    try:
        parsed = tomllib.loads(f"x = [{values}]")["x"] if values else []
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--vary {text!r}: expected TABLE.KEY=VALUE,VALUE with TOML values: {error}") from error
    if not parsed:
        raise ConfigError(f"--vary {text!r}: expected TABLE.KEY=VALUE,VALUE")
    return key.strip(), parsed


@app.command
def sweep(
    config: Path,
    *,
    vary: Annotated[tuple[str, ...], Parameter(name="--vary", negative=())],
    tuned: Annotated[tuple[str, ...], Parameter(name="--tuned", negative=())] = (),
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Simulate a scenario at every combination of some settings.

    Parameters
    ----------
    config
        The scenario.
    vary
        TABLE.KEY=VALUE,VALUE with TOML values, such as cluster.cells=4,8,16; may be given more than once.
    tuned
        Also tune this preset at each point, at the scheduler's staleness budget; may be given more than once.
    json_file
        Write a row per point.
    """
    for name in tuned:
        if name not in PRESETS:
            raise ConfigError(f"--tuned {name!r}: one of {', '.join(PRESETS)}")
    axes = [_axis(text) for text in vary]
    document = tomllib.loads(config.read_text()) if config.is_file() else {}
    load(config)
    console = Console(highlight=False)
    rows = []
    with _progress() as progress:
        task = progress.add_task("sweeping")
        for values in product(*(v for _, v in axes)):
            point = dict(zip((k for k, _ in axes), values, strict=True))
            copy: dict[str, Any] = json.loads(json.dumps(document))
            for key, value in point.items():
                _set(copy, key, value)
            label = ", ".join(f"{k} = {v}" for k, v in point.items())
            progress.update(task, description=label)
            scenario, policy = parse(copy, config.parent)
            summaries = {"scheduler": summarize(scenario, policy), **_tuned(scenario, policy.max_staleness, tuned)}
            console.print(_table(summaries, label))
            rows.append({**point, **{n: _record(s) for n, s in summaries.items()}})
    if json_file is not None:
        _write(json_file, json.dumps(rows, indent=1))


@app.command
def paper(*, seeds: int = 20, json_file: Annotated[Path | None, Parameter(name="--json")] = None) -> None:
    """Simulate the paper's scheduling table and list every assumption it takes.

    Parameters
    ----------
    seeds
        Runs per line; small budgets and sensitivity take a quarter of them.
    json_file
        Write the lines.
    """
    if seeds < 2:
        raise ConfigError("--seeds must be at least 2: the intervals are over seeds")
    console = Console(highlight=False)
    console.print("Step-time ratios; published numbers next to simulated ones. Assumed:")
    for assumption in ASSUMPTIONS:
        console.print(f"  - {assumption}", soft_wrap=True)
    lines = []
    with _progress() as progress:
        task = progress.add_task("simulating")
        for line in report(seeds, lambda what: progress.update(task, description=what)):
            lines.append(line)
            console.print(f"{line.part:14} {line}", soft_wrap=True)
    if json_file is not None:
        rows = [dataclasses.asdict(line) for line in lines]
        _write(json_file, json.dumps({"seeds": seeds, "assumptions": ASSUMPTIONS, "lines": rows}, indent=1))


def _tuned(scenario: Scenario, staleness: int | None, names: Sequence[str]) -> dict[str, Summary]:
    out = {}
    for name in names:
        if staleness is None:
            raise ConfigError("--tuned needs scheduler.max_staleness: modes are compared at one budget")
        found = best(scenario, candidates(scenario, name, staleness, steps=min(scenario.steps, 16)), 1.0)
        if found is not None:
            out[f"{name} (tuned)"] = found
    return out


@forecast_app.default
def forecast(
    trace: Path,
    *,
    cells: int = 8,
    slots: int = 32,
    gpus_per_cell: int = 8,
    groups_per_step: int = 32,
    group_size: int = 8,
    staleness: int = 1,
    train_share: float = 0.2,
    seconds_per_mtoken: float | None = None,
    timeout_s: float | None = None,
    seeds: int = 3,
    steps: int = 16,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Forecast step times on a cluster from recorded executions, and say what to choose.

    Parameters
    ----------
    trace
        A Gyre run folder, or a CSV or JSON-lines table (start, end, outcome, tokens, group, engine_s).
    cells
        K, cells of the cluster.
    slots
        Executions one cell in rollout serves at once. The recorded durations are taken to be at this load.
    gpus_per_cell
        For GPU-hours.
    groups_per_step
        B.
    group_size
        Executions per group.
    staleness
        Budget S: how many versions late a group may train.
    train_share
        Training's share of the cells' work, when `--seconds-per-mtoken` isn't given.
    seconds_per_mtoken
        Training time of one cell per million unique tokens; needs a trace with token counts.
    timeout_s
        Time limit of an execution; default: the recorded time-outs' median.
    seeds
        Runs per forecast; the intervals are over them.
    steps
        Optimizer steps per run.
    json_file
        Write everything.
    """
    costs = None
    if seconds_per_mtoken is not None:
        costs = Costs(train_s_per_token=seconds_per_mtoken / 1e6, reference_load=float(slots), load_scale=slots * 0.75)
    if steps <= WARMUP:
        raise ConfigError(f"--steps must be more than the {WARMUP} that warm up, not {steps}")
    with _progress() as progress:
        task = progress.add_task("reading the trace")
        result = forecast_trace(
            trace,
            staleness=staleness,
            group_size=group_size,
            costs=costs,
            train_share=train_share,
            cells=cells,
            slots=slots,
            gpus_per_cell=gpus_per_cell,
            groups_per_step=groups_per_step,
            timeout_s=timeout_s,
            seeds=seeds,
            steps=steps,
            say=lambda what: progress.update(task, description=what),
        )
    _print_forecast(Console(highlight=False), result)
    if json_file is not None:
        _write(json_file, json.dumps(_forecast_record(result), indent=1))


def _print_forecast(console: Console, result: Forecast) -> None:
    console.print(f"{result.executions} executions; staleness budget S = {result.staleness}")
    for sentence in result.indicators.sentences():
        console.print(f"  {sentence}")
    shown = {mode: result.modes[mode] for mode in MODES if mode in result.modes}
    console.print(_table(shown, "rivals tuned, gyre as shipped"))
    for left_out in sorted(set(MODES) - set(shown)):
        console.print(f"{left_out}: no setting keeps the share of cut executions within one point of gyre's")
    console.print(_table({v.name: v.summary for v in result.variations}, "gyre with one thing changed"))
    for line in result.words():
        console.print(line, soft_wrap=True)


def _forecast_record(result: Forecast) -> dict[str, Any]:
    return {
        "executions": result.executions,
        "staleness": result.staleness,
        "indicators": dataclasses.asdict(result.indicators),
        "modes": {mode: _record(s) for mode, s in result.modes.items()},
        "variations": {v.name: _record(v.summary) for v in result.variations},
        "choice": result.choice,
        "words": result.words(),
    }
