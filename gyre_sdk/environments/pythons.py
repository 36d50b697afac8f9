"""CPython installations of this machine: for verifiers, and as what a task's `FROM python:3.X` stands for."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from gyre_sdk.errors import SandboxError

_NEWEST_FIRST = ("3.13", "3.12", "3.11", "3.14", "3.10", "3.9")
"""Which one an image tag without a version stands for."""


def of_image(image: str) -> str | None:
    """'3.13' for `python:3.13-slim-bookworm`, '' for a `python` image that names no minor version, None for other images."""
    name, _, tag = image.partition("@")[0].partition(":")
    if name != "python":
        return None
    match = re.match(r"3\.\d+", tag)
    return match.group() if match else ""


def find(version: str) -> Path:
    """Home (its `bin/pythonX.Y` is there) of a CPython `version`; '' is any. Raises SandboxError that says how to get one."""
    for wanted in [version] if version else _NEWEST_FIRST:
        for candidate in _candidates(wanted):
            library = candidate / "lib" / f"python{wanted}" / "os.py"
            if (candidate / "bin" / f"python{wanted}").exists() and library.exists():
                return candidate
    raise SandboxError(
        f"this task wants Python {version or 3}, and none was found; install one (uv python install {version or 3}, or a package "
        f"of your system) or set GYRE_PYTHON{version.replace('.', '') or '3XX'} to its home folder"
    )


def version_of(home: Path) -> str:
    """'3.13' of an installation that `find` returned."""
    return next(path.name.removeprefix("python") for path in sorted((home / "lib").glob("python3.*")) if path.is_dir())


def uv_name(home: Path) -> str:
    """What uv calls an installation that it made itself; the patch level is only a name here."""
    return f"cpython-{version_of(home)}.0-linux-{platform.machine()}-gnu"


def _candidates(version: str) -> Iterator[Path]:
    named = os.environ.get(f"GYRE_PYTHON{version.replace('.', '')}")
    if named:
        yield Path(named)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    if pyenv.is_dir():
        yield from sorted(pyenv.glob(f"{version}.*"), reverse=True)
    data = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "uv/python"
    if data.is_dir():
        yield from sorted(data.glob(f"cpython-{version}.*"), reverse=True)
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield Path(sys.base_prefix)
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found).resolve().parent.parent


def main(versions: list[str]) -> None:
    """Print the interpreter of the first of `versions` that is here; exit code 1 and a line when none is."""
    for version in versions:
        with contextlib.suppress(SandboxError):
            sys.stdout.write(f"{find(version) / 'bin' / f'python{version}'}\n")
            return
    sys.exit(
        f"no Python {', '.join(versions)} was found; install one (uv python install {versions[0]}, or a package of your system)"
    )
