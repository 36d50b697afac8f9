"""`gyre tasks PATH`: list task folders and check that they can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from gyre_sdk.environments import load_tasks


def tasks(path: Path, *, only: Annotated[str, Parameter(help="comma-separated names")] = "") -> int:
    """List the tasks under PATH (a task folder, or a folder of them).

    Parameters
    ----------
    path
        Harbor or NL2RepoBench layout; told apart by their files.
    """
    found = load_tasks(path, only=[name for name in only.split(",") if name] or None)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("task", "format", "agent limit", "network", "instruction"):
        table.add_column(column)
    for task in found:
        limit = "-" if task.agent_timeout_s is None else f"{task.agent_timeout_s:g} s"
        first_line = task.instruction.strip().splitlines()[0] if task.instruction.strip() else ""
        table.add_row(task.name, task.format, limit, task.network, first_line[:70])
    Console().print(table)
    return 0
