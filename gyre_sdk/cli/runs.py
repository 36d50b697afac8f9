"""`gyre runs ls|du|rm`: recorded runs are plain folders; these commands list, measure and remove them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.records import wal_paths

app = cyclopts.App(name="runs", help="List, measure and remove recorded runs.")


def runs_root(root: Path | None) -> Path:
    """Where runs lie: as given, else `$GYRE_RUNS`, else ./runs."""
    return root or Path(os.environ.get("GYRE_RUNS", "runs"))


def is_run(path: Path) -> bool:
    """A folder that a run was recorded in."""
    return (path / "run.json").is_file() or (path / "executions").is_dir()


def find_runs(root: Path) -> list[Path]:
    """The runs under `root`, oldest name first."""
    return sorted(path for path in root.iterdir() if is_run(path)) if root.is_dir() else []


def latest_run(root: Path | None = None) -> Path:
    """The newest run. Raises ConfigError when there is none."""
    runs = find_runs(runs_root(root))
    if not runs:
        raise ConfigError(f"no runs under {runs_root(root)}; make one with `gyre demo` or `gyre run`")
    return max(runs, key=lambda path: path.stat().st_mtime)


def _bytes_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _rows(root: Path) -> Iterator[tuple[str, ...]]:
    for path in find_runs(root):
        info: dict[str, object] = {}
        if (path / "run.json").is_file():
            info = msgspec.json.decode((path / "run.json").read_bytes(), type=dict[str, object])
        started = info.get("started")
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(started)) if isinstance(started, float) else "-"
        yield (
            path.name,
            str(info.get("kind", "-")),
            when,
            str(info.get("harness", "-")),
            str(len(wal_paths(path))),
            _size(_bytes_of(path)),
        )


@app.default
@app.command
def ls(*, root: Path | None = None) -> int:
    """List the runs under ROOT (default: $GYRE_RUNS or ./runs)."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("run", "kind", "started (UTC)", "harness", "executions", "size"):
        table.add_column(column, no_wrap=column == "run", overflow="fold" if column == "run" else "ellipsis")
    for row in _rows(runs_root(root)):
        table.add_row(*row)
    Console().print(table)
    return 0


@app.command
def du(run: Path) -> int:
    """What takes the space in a run."""
    if not is_run(run):
        raise ConfigError(f"{run} is not a run's folder")
    parts = sorted(((_bytes_of(p) if p.is_dir() else p.stat().st_size, p.name) for p in run.iterdir()), reverse=True)
    for size, name in parts:
        Console(highlight=False).print(f"{_size(size):>10}  {name}", markup=False)
    return 0


@app.command
def rm(*runs: Path, yes: Annotated[bool, Parameter(alias="-y")] = False) -> int:
    """Remove runs. Asks first, unless --yes is given; refuses folders that are not runs."""
    if not runs:
        raise ConfigError("name the runs to remove; `gyre runs ls` lists them")
    for run in runs:
        if run.is_symlink() or not is_run(run):
            raise ConfigError(f"{run} is not a run's folder; nothing was removed")
    for run in runs:
        if not yes and input(f"remove {run} ({_size(_bytes_of(run))})? [y/N] ").strip().lower() != "y":
            continue
        shutil.rmtree(run)
    return 0
