"""`gyre export`: executions in other people's formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from gyre_sdk.cli.graph import find_target
from gyre_sdk.errors import ConfigError
from gyre_sdk.exporters import FORMATS
from gyre_sdk.exporters import export as write
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.harness.records import wal_paths


def export(
    target: str = "",
    *,
    to: Annotated[str, Parameter(help=f"one of: {', '.join(FORMATS)}")],
    out: Annotated[Path, Parameter(alias="-o")] = Path("export"),
) -> int:
    """Export an execution, or all executions of a run.

    Parameters
    ----------
    target
        An execution's id, folder or log, or a run's folder; nothing means the newest run.
    out
        Folder to write into; made if it is not there.
    """
    log = find_target(target)
    logs = wal_paths(log) if log.is_dir() else [log]

    console = Console()
    unreadable: list[str] = []

    def graphs() -> Iterator[BranchGraph]:
        for path in logs:
            try:
                yield load_graph(path, keep_bodies=True).graph
            except ConfigError as error:
                if len(logs) == 1:
                    raise
                unreadable.append(str(error))

    with console.status(f"exporting {len(logs)} executions"):
        files = write(to, graphs(), out)
    for file in files[:20]:
        console.print(str(file), highlight=False, markup=False, soft_wrap=True)
    if len(files) > 20:
        console.print(f"... and {len(files) - 20} more in {out}", markup=False)
    for problem in unreadable:
        console.print(f"left out: {problem}", style="yellow", markup=False, soft_wrap=True)
    return 1 if unreadable else 0
