"""Finding the tasks under a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gyre_sdk.environments import harbor, nl2repo
from gyre_sdk.environments.task import Task
from gyre_sdk.errors import TaskError


def load_tasks(path: Path, only: Iterable[str] | None = None) -> list[Task]:
    """The task at `path`, or every task in it, sorted by name. `only` names those wanted.

    Raises TaskError: no task there, an unknown name, or a malformed task (the message names file and key).
    """
    if not path.is_dir():
        raise TaskError(f"{path}: no such folder of tasks")
    folders = find(path)
    if not folders:
        raise TaskError(f"{path}: no tasks here (looked for task.toml, and for start.md with test_commands.json)")
    if only is not None:
        wanted = list(dict.fromkeys(only))
        named = {folder.name: folder for folder in folders}
        missing = [name for name in wanted if name not in named]
        if missing:
            raise TaskError(f"{path}: no task {missing[0]!r}; there are: {', '.join(sorted(named)[:20])}")
        folders = [named[name] for name in wanted]
    return [load_task(folder) for folder in folders]


def load_task(folder: Path) -> Task:
    """Read one task folder of any known format. Raises TaskError."""
    return nl2repo.load(folder) if nl2repo.is_task(folder) else harbor.load(folder)


def find(path: Path) -> list[Path]:
    """Task folders at or below `path` (three levels), sorted."""
    if _is_task(path):
        return [path]
    found: list[Path] = []
    level = [path]
    for _ in range(3):
        children = [
            child for parent in level for child in sorted(parent.iterdir()) if child.is_dir() and child.name[0] != "."
        ]
        found += [child for child in children if _is_task(child)]
        level = [child for child in children if not _is_task(child)]
    return sorted(found)


def _is_task(folder: Path) -> bool:
    return harbor.is_task(folder) or nl2repo.is_task(folder)
