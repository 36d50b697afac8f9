"""What grading needs from outside: environments with pinned packages, and sdists with their hidden tests. Made once, kept in the cache."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.environments.nl2repo.pins import PYTEST, Pin
from gyre_sdk.environments.sandbox import choose
from gyre_sdk.environments.sandbox.base import Limits, Network, SandboxSpec
from gyre_sdk.environments.toolkit import cache_home, cache_lock
from gyre_sdk.errors import SandboxError

_locks: dict[str, asyncio.Lock] = {}
_INSTALL_S = 900.0
_BUILDERS = (
    "pip>=25",
    "setuptools>=77",
    "wheel",
    "hatchling>=1.27",
    "flit_core>=3.11",
    "poetry-core>=2",
    "setuptools-scm>=8",
    "hatch-vcs",
)
"""Build back ends that most packages use: pip asks them for an sdist's metadata when it fetches it."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """A virtual environment of this machine and the interpreter under it; both are shown read-only to the grading sandbox."""

    venv: Path

    @property
    def mounts(self) -> dict[Path, str]:
        """What must be visible."""
        base = Path(sys.base_prefix).resolve()
        found = {self.venv: str(self.venv)}
        if not base.is_relative_to("/usr"):
            found[base] = str(base)
        return found


async def workshop(requirements: Sequence[str] = (PYTEST,)) -> Workshop:
    """An environment with exactly these wheels. Raises SandboxError."""
    key = hashlib.sha256("\n".join([sys.version, sys.base_prefix, *requirements]).encode()).hexdigest()[:16]
    final = cache_home() / "nl2repo" / f"env-{key}"
    async with _locks.setdefault(str(final), asyncio.Lock()):
        if not (final / "ready").exists():
            await asyncio.to_thread(_install, final, requirements)
    return Workshop(final)


def _install(final: Path, requirements: Sequence[str]) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with cache_lock(final.name):
        if not (final / "ready").exists():
            _make(final, requirements)


def _make(final: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(final, ignore_errors=True)
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    _call([str(python), "-m", "venv", "--without-pip", str(final)])
    # Wheels only: nothing of a package runs on this machine while it is installed.
    pip = [sys.executable, "-m", "pip", "--python", str(final / "bin/python"), "-q", "--disable-pip-version-check"]
    _call([*pip, "install", "--only-binary", ":all:", *requirements])
    (final / "ready").touch()


def _call(argv: Sequence[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_S, cwd="/", check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"a grading environment could not be made: {error}") from error
    if done.returncode != 0:
        raise SandboxError(f"a grading environment could not be made: {done.stderr.strip()[-300:]}")


async def sdist(pin: Pin, backend: str) -> Path:
    """The unpacked sdist of a pin. Raises SandboxError."""
    final = cache_home() / "nl2repo" / f"{pin.package}-{pin.version}"
    async with _locks.setdefault(str(final), asyncio.Lock()):
        if not final.exists():
            await _fetch(pin, final, backend)
    return final


async def _fetch(pin: Pin, final: Path, backend: str) -> None:
    """pip reads an sdist's metadata by running its build, so it does that in a sandbox."""
    shop = await workshop(_BUILDERS)
    keep = (
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_CERT",
        "SSL_CERT_FILE",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "NO_PROXY",
    )
    env = {name: os.environ[name] for name in keep if name in os.environ}
    limits = Limits(memory_mb=2048, disk_mb=1024)
    sandbox = choose.create(
        SandboxSpec(name="fetch", network=Network("on"), read_only_mounts=shop.mounts, env=env, limits=limits), backend
    )
    options = "-q --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation"
    command = f"{shop.venv}/bin/python -m pip download {options} -d /app/out {pin.package}=={pin.version}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gyre-sdist-", dir=final.parent) as folder:
        try:
            await sandbox.start()
            done = await sandbox.exec(command, timeout=_INSTALL_S)
            if done.rc != 0:
                raise SandboxError(f"{pin.package}=={pin.version} could not be fetched: {done.stderr.strip()[-300:]}")
            await sandbox.download("/app/out", Path(folder) / "out")
        finally:
            await sandbox.stop()
        await asyncio.to_thread(_unpack, Path(folder), final)


def _unpack(folder: Path, final: Path) -> None:
    archive = next((folder / "out").iterdir())
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "tree", filter="data")
    roots = list((folder / "tree").iterdir())
    if len(roots) != 1 or not roots[0].is_dir():
        raise SandboxError(f"{archive.name} is not an sdist")
    with cache_lock("sdists"):
        if not final.exists():
            roots[0].rename(final)
