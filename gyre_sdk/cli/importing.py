"""`gyre import`: executions from elsewhere as executions of a run, for `graph`, `view`, `export` and training."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from gyre_sdk.cli.assembly import RunInfo, make_run_dir
from gyre_sdk.cli.runs import is_run
from gyre_sdk.errors import ConfigError
from gyre_sdk.exporters import Imported, from_atif
from gyre_sdk.harness.records import summaries, wal_paths
from gyre_sdk.wire import encode, file_header, verify


def import_(
    *sources: Path,
    into: Annotated[Path | None, Parameter(help="the run's folder; default: ./runs/TIME-import")] = None,
) -> int:
    """Bring executions into a run. What the run holds already is left alone, and said.

    Parameters
    ----------
    sources
        ATIF documents (.json), folders of them, or folders of Gyre runs. Documents of one session are one execution.
    """
    if not sources:
        raise ConfigError("name what to import: ATIF documents, folders of them, or run folders")
    documents, runs = _sort(sources)
    folder, console = make_run_dir(into, "import"), Console(highlight=False)
    count, skipped, notes = 0, 0, []
    with console.status("importing"):
        for imported in _sessions(documents):
            if _write(imported, folder):
                count += 1
            else:
                skipped += 1
            if imported.without_tokens:
                notes.append(f"{imported.execution}: {imported.without_tokens} steps without token ids are left out")
        for run in runs:
            done, there, damaged = _copy(run, folder)
            count, skipped = count + done, skipped + there
            notes += damaged
    if not (folder / "run.json").is_file():
        _describe(folder)
    console.print(f"{count} executions imported into {folder}", markup=False, soft_wrap=True)
    if skipped:
        console.print(f"{skipped} were there already", markup=False)
    for note in notes[:20]:
        console.print(note, markup=False, soft_wrap=True, style="yellow")
    return 0 if count or skipped else 1


def _sort(sources: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(ATIF documents, runs). Raises ConfigError before anything is written."""
    documents: list[Path] = []
    runs: list[Path] = []
    for source in sources:
        if source.is_file():
            documents.append(source)
        elif is_run(source):
            runs.append(source)
        elif source.is_dir() and (found := sorted(source.rglob("*.json"))):
            documents += found
        else:
            raise ConfigError(f"{source} is no ATIF document, no folder of them, and no run's folder")
    return documents, runs


def _sessions(documents: Sequence[Path]) -> Iterator[Imported]:
    names = iter(documents)
    try:
        yield from from_atif(path.read_bytes() for path in names)
    except OSError as error:
        raise ConfigError(f"can't be read: {error}") from error


def _write(imported: Imported, folder: Path) -> bool:
    """One execution's log, whole or not at all. False when there is one of that id."""
    target = folder / "executions" / imported.execution
    if target.exists():
        return False
    temporary = target.with_name(f".{target.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with (temporary / "wal.gyre").open("wb") as file:
        file.write(file_header())
        for seq, record in enumerate(imported.records):
            file.write(encode(record, seq))
    temporary.rename(target)
    return True


def _copy(run: Path, folder: Path) -> tuple[int, int, list[str]]:
    """Executions of another run: (copied, there already, what was wrong with the others)."""
    if run.resolve() == folder:
        raise ConfigError(f"{run} can't be imported into itself")
    done, there, damaged = 0, 0, []
    for log in wal_paths(run):
        target = folder / "executions" / log.parent.name
        if target.exists():
            there += 1
            continue
        report = verify(log)
        if report.damage or not report.frames:
            damaged.append(f"left out: {report}; `gyre wal repair` may help")
            continue
        temporary = target.with_name(f".{target.name}.new")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(log.parent, temporary, symlinks=True)
        temporary.rename(target)
        done += 1
    return done, there, damaged


def _describe(folder: Path) -> None:
    found = list(summaries(folder))
    models = {one.opened.model for one in found if one.opened.model}
    harnesses = {one.opened.harness for one in found if one.opened.harness}
    tasks = sorted({one.opened.task for one in found if one.opened.task})
    RunInfo("import", time.time(), ", ".join(sorted(models)), ", ".join(sorted(harnesses)), tasks, 1).write(folder)
