"""Sandboxes of every backend that really works here; one that doesn't is skipped, saying why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gyre_sdk.environments import pythons
from gyre_sdk.environments.sandbox import Limits, Sandbox, SandboxSpec, choose
from gyre_sdk.errors import SandboxError

from .resume import pytest_collection_modifyitems, pytest_runtest_makereport

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport"]
collect_ignore = ["fixtures"]
SMALL = Limits(memory_mb=512, pids=128, disk_mb=64)
EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
Maker = Callable[..., Awaitable[Sandbox]]


def need(backend: str) -> str:
    """The backend, or a skip that says why it does not work here."""
    found = asyncio.run(choose.probe(backend))
    if not found.usable:
        pytest.skip(f"sandbox backend {backend}: {found.detail}")
    return backend


@pytest.fixture(scope="session", params=["bwrap", "unshare"])
def isolating(request: pytest.FixtureRequest) -> str:
    """Name of a backend with walls."""
    return need(request.param)


@pytest.fixture(scope="session")
def best() -> str:
    """The backend that `auto` means here."""
    for name in choose.AUTOMATIC:
        if asyncio.run(choose.probe(name)).usable:
            return name
    pytest.skip("no isolating sandbox backend works here")


@pytest.fixture(scope="session")
def python313() -> None:
    """For tasks whose test.sh asks for it."""
    try:
        pythons.find("3.13")
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
async def started() -> AsyncIterator[Maker]:
    """Starts sandboxes, and stops them at the end."""
    async with AsyncExitStack() as stack:

        async def make(backend: str, **fields: object) -> Sandbox:
            spec = SandboxSpec(**({"limits": SMALL} | fields))  # type: ignore[arg-type]
            sandbox = choose.create(spec, backend)
            stack.push_async_callback(sandbox.stop)
            await sandbox.start()
            return sandbox

        yield make
