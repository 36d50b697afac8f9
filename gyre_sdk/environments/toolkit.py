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
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.environments import pythons
from gyre_sdk.environments.sandbox.base import PRIVATE, PrivateMount, Sandbox
from gyre_sdk.errors import SandboxError

UV = "uv==0.9.5"
PYTEST = ("pytest==8.4.1", "pytest-json-ctrf==0.3.5")
_PYTHON = "3.13"
_AT = "/opt/gyre"
_ENV_FILE = """#!/bin/sh
case ":${PATH}:" in *:"$HOME/.local/bin":*) ;; *) export PATH="$HOME/.local/bin:$PATH" ;; esac
"""
_INDEX_S, _INDEX_AGAIN_S = 5.0, 300.0
_lock = asyncio.Lock()
_index = (-_INDEX_AGAIN_S, False)
"""When the package index was asked last, and whether it answered."""


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
        # Where uv looks before it looks on PATH: the interpreter in the agent's reach is not the one that tests run with.
        mounts.append(PrivateMount(f"{_AT}/pythons/{pythons.uv_name(self.python)}", source=self.python))
        mounts.append(PrivateMount(f"{_AT}/wheels", source=self.wheels))
        mounts.append(PrivateMount(f"{_AT}/uv-cache", name="uvcache"))
        return mounts

    def env(self, path: str, *, offline: bool) -> dict[str, str]:
        """Settings that make uv and pip use the above; with `offline` they don't even try the network."""
        settings = {
            "PATH": f"{path}:{self.python}/bin",
            "UV_CACHE_DIR": f"{_AT}/uv-cache",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_PYTHON_INSTALL_DIR": f"{_AT}/pythons",
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


async def index_answers() -> bool:
    """Whether the package index can be reached from here; asked again after some minutes."""
    global _index
    async with _lock:
        asked, answers = _index
        if time.monotonic() - asked > _INDEX_AGAIN_S:
            answers = await asyncio.to_thread(_ask_index)
            _index = (time.monotonic(), answers)
        return answers


def _ask_index() -> bool:
    index = os.environ.get("UV_INDEX_URL") or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/pytest/", timeout=_INDEX_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


async def toolkit() -> Toolkit:
    """The toolkit, prepared when it is not there yet. Raises SandboxError that says what is missing."""
    async with _lock:
        return await asyncio.to_thread(_prepare, cache_home() / "toolkit-2")


def _prepare(folder: Path) -> Toolkit:
    python = pythons.find(_PYTHON)
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
    # A project of uv resolves for every system, so it also asks for what only others need.
    project = folder / "project"
    project.mkdir()
    for words in (["init", "--bare", "--python", runner], ["add", "--python", runner, *PYTEST]):
        _call([str(folder / "bin/uv"), "--directory", str(project), *words], "uv's cache", env)
    shutil.rmtree(project)
    (folder / "ready").touch()


def _call(argv: list[str], what: str, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=env, cwd="/", check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{what} could not be prepared for verifiers: {error}") from error
    if done.returncode != 0:
        raise SandboxError(f"{what} could not be prepared for verifiers: {done.stderr.strip()[-300:]}")
