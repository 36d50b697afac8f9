"""The embedded engine always; the real SGLang server with `-m sglang` (its environment: make test-sglang)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_backend.engines.embedded import EmbeddedEngine, load_model
from gyre_backend.models import tiny_dir
from tests.engines.served import Served, process, serving


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models that differ in their weights only."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_dir(folder / "a", seed=1), tiny_dir(folder / "b", seed=2)


@pytest.fixture(
    scope="session",
    params=["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)])],
)
def started(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"

    def serve(url: str) -> Iterator[Served]:
        served = Served(url, *models, seconds=60)
        yield served
        served.http.close()

    if request.param == "sglang":
        from gyre_backend.engines.sglang_cpu import launch_command

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        venv = Path(os.environ.get("GYRE_SGLANG_VENV", Path(__file__).parents[2] / ".venv-sglang"))
        limits = ("--max-total-tokens", "16384", "--max-running-requests", "4")
        command = launch_command(venv, str(models[0]), str(port), version="1", more=limits)
        with process(command, f"http://127.0.0.1:{port}", log, 400) as url:
            yield from serve(url)
        return
    engine = EmbeddedEngine(load_model(models[0]), version=1, max_batch=4, kv_tokens=16384, model_path=str(models[0]))
    with serving(engine.app()) as url:
        yield from serve(url)
    engine.close()


@pytest.fixture
def server(started: Served) -> Iterator[Served]:
    """A server at rest, with the weights and the version it was started with."""
    yield started
    started.settle()
    if started.version != "1":
        started.ok("/update_weights_from_disk", {"model_path": started.home, "weight_version": "1"})
