"""A run's folder to look at, and a client that never leaves the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.viewer_runs import make_run, training_files
from gyre_sdk.viewer.server import Viewer
from tests.viewer.browsing import browser, page, serve

__all__ = ["browser", "page", "serve"]  # fixtures, used by name

EDGES = "0123456789ab"
"""The execution with every kind of edge."""

Open = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of 18 executions. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "20261129-demo"
    training_files(folder, make_run(folder, executions=18))
    return folder


@pytest.fixture
def open_client() -> Open:
    """Opens a client to a viewer's app."""

    @asynccontextmanager
    async def opened(
        folder: Path, *, base_url: str = "http://127.0.0.1:8000", **options: object
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = Viewer(folder, poll_s=0.01).app(**options)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url) as client:
            yield client

    return opened
