"""Which backend: each is tried by really running a command in it, once per process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_sdk.environments.sandbox.base import Capabilities, Limits, Sandbox, SandboxSpec
from gyre_sdk.environments.sandbox.container import ContainerSandbox, engine_problem
from gyre_sdk.environments.sandbox.journal import Swept, sweep
from gyre_sdk.environments.sandbox.namespaced import NamespaceSandbox
from gyre_sdk.environments.sandbox.process import ProcessSandbox
from gyre_sdk.errors import ConfigError, SandboxError

BACKENDS: dict[str, Callable[[SandboxSpec], Sandbox]] = {
    "bwrap": lambda spec: NamespaceSandbox(spec, "bwrap"),
    "unshare": lambda spec: NamespaceSandbox(spec, "unshare"),
    "podman": lambda spec: ContainerSandbox(spec, "podman"),
    "docker": lambda spec: ContainerSandbox(spec, "docker"),
    "process": ProcessSandbox,
}
"""In order of preference; `process` isolates nothing and is never chosen by itself."""
AUTOMATIC = ("bwrap", "unshare", "podman", "docker")


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend works here; `detail` says what it enforces, or why not and what to do."""

    name: str
    usable: bool
    detail: str = ""
    capabilities: Capabilities = field(default_factory=Capabilities)


_known: dict[str, Probe] = {}
_swept: list[Swept] = []


async def probe(backend: str) -> Probe:
    """Start a sandbox of `backend`, run a command in it, stop it. The answer is remembered."""
    if backend not in BACKENDS:
        raise ConfigError(f"unknown sandbox backend {backend!r}; known are: auto, {', '.join(BACKENDS)}")
    if backend not in _known:
        _known[backend] = await _try(backend)
    return _known[backend]


async def probe_backends() -> list[Probe]:
    """Every backend, in order of preference."""
    return [await probe(backend) for backend in BACKENDS]


async def _try(backend: str) -> Probe:
    problem = await asyncio.to_thread(_obvious_problem, backend)
    if problem:
        return Probe(backend, False, problem)
    sandbox = BACKENDS[backend](SandboxSpec(name="probe", limits=Limits(memory_mb=256, pids=64, disk_mb=64)))
    try:
        await sandbox.start()
        result = await sandbox.exec("echo works", timeout=20)
        if result.stdout.strip() != "works":
            return Probe(backend, False, f"a command in it failed: {result.stderr.strip()[-200:]}")
        return Probe(backend, True, _enforced(sandbox.capabilities), sandbox.capabilities)
    except SandboxError as error:
        return Probe(backend, False, str(error))
    finally:
        with contextlib.suppress(SandboxError):
            await sandbox.stop()


def _enforced(able: Capabilities) -> str:
    """In words, what a backend enforces."""
    flags = {
        "network off": able.network_off,
        "memory": able.memory_limit,
        "cpu": able.cpu_limit,
        "pids": able.pids_limit,
        "disk": able.disk_limit,
        "kills all": able.kills_all,
    }
    return ", ".join(name for name, on in flags.items() if on) or "isolates nothing; only by name"


def _obvious_problem(backend: str) -> str:
    if backend in ("podman", "docker"):
        return engine_problem(backend)
    if backend == "process":
        return ""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if os.getuid() != 0:
        return "needs root (mounts, control groups)"
    if backend == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed: apt-get install bubblewrap"
    return ""


async def resolve(backend: str) -> str:
    """The backend that `auto` means here, or `backend` itself if it works. Raises SandboxError.

    The first call of a process also sweeps what dead runners left.
    """
    if not _swept:
        _swept.append(await asyncio.to_thread(sweep))
    if backend != "auto":
        found = await probe(backend)
        if not found.usable:
            raise SandboxError(f"sandbox backend {backend} does not work here: {found.detail}")
        return backend
    problems = []
    for name in AUTOMATIC:
        found = await probe(name)
        if found.usable:
            return name
        problems.append(f"{name}: {found.detail}")
    raise SandboxError(
        f"no sandbox backend works here ({'; '.join(problems)}); `process` isolates nothing and must be named"
    )


def create(spec: SandboxSpec, backend: str) -> Sandbox:
    """A sandbox, not started. `backend` is a real name (see `resolve`)."""
    if backend not in BACKENDS:
        raise ConfigError(f"unknown sandbox backend {backend!r}; known are: auto, {', '.join(BACKENDS)}")
    return BACKENDS[backend](spec)
