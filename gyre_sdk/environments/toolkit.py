"""What the usual test.sh wants and a sandbox without network can't fetch: uv, CPython 3.13, pytest with its CTRF plug-in.

Prepared once per machine (this needs the package index), in the cache folder; shown read-only to verifiers that ask for uv or pip.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.environments.sandbox.base import PRIVATE, PrivateMount, Sandbox
from gyre_sdk.errors import SandboxError

UV = "uv==0.9.5"
PYTEST = ("pytest==8.4.1", "pytest-json-ctrf==0.3.5")
_PYTHON = "3.13"
_AT = "/opt/gyre"
_ENV_FILE = """#!/bin/sh
case ":${PATH}:" in *:"$HOME/.local/bin":*) ;; *) export PATH="$HOME/.local/bin:$PATH" ;; esac
"""
_lock = asyncio.Lock()


@dataclass(frozen=True, slots=True)
class Toolkit:
    """Folders of this machine."""

    bin: Path
    """uv, uvx and the `env` file that test scripts source."""
    python: Path
    """Home of a CPython 3.13: bin/python3.13 in it."""
    cache: Path
    """A warm uv cache."""
    wheels: Path
    """Wheels for pip."""

    def mounts(self, home: str) -> list[PrivateMount]:
        """Shown to the verifier alone; what the agent put at these places is not seen."""
        mounts = [
            PrivateMount(f"{home.rstrip('/')}/.local/bin/{name}", source=self.bin / name)
            for name in ("uv", "uvx", "env")
        ]
        mounts.append(PrivateMount(str(self.python), source=self.python))
        mounts.append(PrivateMount(f"{_AT}/wheels", source=self.wheels))
        mounts.append(PrivateMount(f"{_AT}/uv-cache", name="uvcache"))
        return mounts

    def env(self, path: str, *, offline: bool) -> dict[str, str]:
        """Settings that make uv and pip use the above; with `offline` they don't even try the network."""
        settings = {
            "PATH": f"{path}:{self.python}/bin",
            "UV_CACHE_DIR": f"{_AT}/uv-cache",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_LINK_MODE": "copy",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        if offline:
            settings |= {
                "UV_OFFLINE": "1",
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": f"{_AT}/wheels",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            }
        return settings

    async def warm(self, sandbox: Sandbox) -> None:
        """Put a private copy of the cache into the sandbox: uv writes to its cache."""
        await sandbox.upload(self.cache, PRIVATE + "uvcache", fresh=True)


def wanted_by(tests: Path) -> bool:
    """Whether a test script uses uv or pip."""
    try:
        text = (tests / "test.sh").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"\b(uvx?|astral\.sh|pip3?\s+install|python3\.13)\b", text) is not None


def cache_home() -> Path:
    """$GYRE_CACHE, or ~/.cache/gyre."""
    named = os.environ.get("GYRE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "gyre"


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """One process at a time fills a part of the cache; the others wait and find it there."""
    folder = cache_home()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def toolkit() -> Toolkit:
    """The toolkit, prepared when it is not there yet. Raises SandboxError that says what is missing."""
    async with _lock:
        return await asyncio.to_thread(_prepare, cache_home() / "toolkit-1")


def _prepare(folder: Path) -> Toolkit:
    python = find_python()
    kit = Toolkit(folder / "bin", python, folder / "uv-cache", folder / "wheels")
    if (folder / "ready").exists():
        return kit
    with cache_lock("toolkit"):
        if not (folder / "ready").exists():
            _make(folder, python)
    return kit


def _make(folder: Path, python: Path) -> None:
    making = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    try:
        _fill(making, python)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _fill(folder: Path, python: Path) -> None:
    for name in ("bin", "wheels", "uv-cache"):
        (folder / name).mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    _call([*pip, "install", "--no-deps", "--target", str(folder / "uv"), UV], "uv")
    for name in ("uv", "uvx"):
        found = next((folder / "uv").rglob(f"bin/{name}"))
        shutil.copy2(found, folder / "bin" / name)
    shutil.rmtree(folder / "uv")
    (folder / "bin/env").write_text(_ENV_FILE)
    runner = str(python / "bin" / f"python{_PYTHON}")
    _call(
        [
            runner,
            "-m",
            "pip",
            "-q",
            "--disable-pip-version-check",
            "download",
            "-d",
            str(folder / "wheels"),
            *PYTEST,
            "setuptools",
            "wheel",
        ],
        "pytest's wheels",
    )
    env = os.environ | {"UV_CACHE_DIR": str(folder / "uv-cache"), "UV_PYTHON_DOWNLOADS": "never"}
    extras = [part for name in PYTEST for part in ("-w", name)]
    # The names and pins the usual test.sh asks for: what uv resolves here it finds again without the network.
    _call([str(folder / "bin/uvx"), "--python", runner, *extras, "pytest", "--version"], "uv's cache", env)
    (folder / "ready").touch()


def _call(argv: list[str], what: str, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=env, cwd="/", check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{what} could not be prepared for verifiers: {error}") from error
    if done.returncode != 0:
        raise SandboxError(f"{what} could not be prepared for verifiers: {done.stderr.strip()[-300:]}")


def find_python() -> Path:
    """Home of a CPython 3.13 of this machine. Raises SandboxError that says how to get one."""
    for candidate in _candidates():
        executable = candidate / "bin" / f"python{_PYTHON}"
        if executable.exists() and (candidate / "lib" / f"python{_PYTHON}" / "os.py").exists():
            return candidate
    raise SandboxError(
        f"this task's test.sh wants Python {_PYTHON}, and none was found; install one (uv python install {_PYTHON}, "
        "or a package of your system) or set GYRE_PYTHON313 to its home folder"
    )


def _candidates() -> Iterable[Path]:
    named = os.environ.get("GYRE_PYTHON313")
    if named:
        yield Path(named)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    if pyenv.is_dir():
        yield from sorted(pyenv.glob(f"{_PYTHON}.*"), reverse=True)
    data = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "uv/python"
    if data.is_dir():
        yield from sorted(data.glob(f"cpython-{_PYTHON}.*"), reverse=True)
    found = shutil.which(f"python{_PYTHON}")
    if found:
        yield Path(found).resolve().parent.parent
