"""Reader of the public NL2RepoBench layout: start.md, test_commands.json, test_files.json, test_case_count.txt."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gyre_sdk.environments.nl2repo.pins import Pin, pins
from gyre_sdk.environments.sandbox.base import Limits, Network
from gyre_sdk.environments.task import Environment, Phase, RepoSpec, Step, Task, Verifier
from gyre_sdk.errors import TaskError

WORKDIR = "/workspace"
_INSTRUCTION = (
    "Read start.md in the current directory, and build the project that it describes there, complete and working."
)
_IMAGE = "ghcr.io/multimodal-art-projection/nl2repobench/{task}:1.0"
_VERIFIER_S = 1800.0
_SPEC_LIMIT = 4 << 20


def is_task(folder: Path) -> bool:
    """Whether `folder` is an NL2RepoBench task."""
    return (folder / "start.md").is_file() and (folder / "test_commands.json").is_file()


def load(folder: Path) -> Task:
    """Read one task. Raises TaskError that names the file.

    How it is graded: by the hidden files in `hidden/` when the folder has them (our own tasks); else by the sdist of the package, when
    the pin table knows the task; else by the task's official image, which needs docker or podman.
    """
    commands = _strings(folder / "test_commands.json")
    remove = _strings(folder / "test_files.json")
    declared = _count(folder / "test_case_count.txt")
    spec_size = (folder / "start.md").stat().st_size
    if not 0 < spec_size < _SPEC_LIMIT:
        raise TaskError(f"{folder / 'start.md'}: {spec_size} bytes is no specification")
    name = folder.name
    pin = pins().get(name.lower())
    return Task(
        name=name,
        folder=folder,
        kind="nl2repo",
        environment=Environment(workdir=WORKDIR, limits=Limits(memory_mb=4096), network=Network("off")),
        steps=(
            Step(
                name="main",
                instruction=_INSTRUCTION,
                agent=Phase(),
                verifier=Verifier(tests=folder, phase=Phase(timeout_s=_VERIFIER_S)),
                solution=folder / "solution" if (folder / "solution").is_dir() else None,
            ),
        ),
        metadata={"variant": _variant(folder, pin)},
        repo=_spec(folder, name, commands, remove, declared, pin),
    )


def _variant(folder: Path, pin: Pin | None) -> str:
    if (folder / "hidden").is_dir():
        return "folder"
    return "sdist" if pin is not None else "image"


def _spec(
    folder: Path, name: str, commands: tuple[str, ...], remove: tuple[str, ...], declared: int, pin: Pin | None
) -> RepoSpec:
    if (folder / "hidden").is_dir():
        packages = _strings(folder / "packages.json") if (folder / "packages.json").is_file() else ()
        return RepoSpec(commands, remove, declared, hidden=folder / "hidden", packages=packages, variant="folder")
    if pin is not None:
        return RepoSpec((pin.command,), pin.tests, pin.declared, packages=pin.packages, variant="sdist")
    image = os.environ.get("GYRE_NL2REPO_IMAGE", _IMAGE).format(task=name.lower())
    return RepoSpec(commands, remove, declared, variant="image", image=image)


def _strings(path: Path) -> tuple[str, ...]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise TaskError(f"{path}: must be a list of strings")
    return tuple(found)


def _count(path: Path) -> int:
    try:
        declared = int(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: must hold one number: {error}") from error
    if declared < 1:
        raise TaskError(f"{path}: {declared} test cases can't be graded")
    return declared
