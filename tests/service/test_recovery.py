"""kill -9 of the core, a satellite, or the service at chosen moments: the run goes on and loses nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from gyre_backend.ledger import Ledger
from tests.service.runner import Runner, backend
from tests.service.test_chaos import cells_of, check_books

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(580)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_version(run_dir: Path, version: int) -> None:
    while True:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []
        if len(lines) >= version:
            return
        await asyncio.sleep(0.05)


async def test_service_and_cells_die_and_the_run_goes_on(write_config: Callable[..., Path], tmp_path: Path) -> None:
    run_dir, port = tmp_path / "run", free_port()
    config = write_config(train={"steps": 4}, cells={"count": 1})
    runner = Runner(f"http://127.0.0.1:{port}", waits=(0.0, 0.2))
    running = asyncio.create_task(runner.run())
    with backend(config, run_dir, port=port, timeout_s=300) as service:
        await until_version(run_dir, 1)
        os.kill((await anyio.to_thread.run_sync(cells_of, service))[0], signal.SIGKILL)
        await until_version(run_dir, 2)
        service.process.kill()
    with backend(config, run_dir, port=port, timeout_s=300):
        await asyncio.wait({running}, timeout=300)
    assert running.done()
    await running
    assert runner.errors == []
    check_books(run_dir, runner, 4)


async def test_another_runner_takes_over(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """A runner that went away: its open groups are dropped, and a resumed run orders others."""
    run_dir, port = tmp_path / "run", free_port()
    url = f"http://127.0.0.1:{port}"
    with backend(write_config("first", train={"steps": 1}), run_dir, port=port, timeout_s=300):
        first = Runner(url)
        await first.run()
    with backend(write_config("second", train={"steps": 2}), run_dir, port=port, timeout_s=300):
        second = Runner(url, name="runner-2")
        await second.run()
    assert first.errors == []
    assert second.errors == []
    assert second.reason == "2 optimizer steps done"
    assert not {execution for execution, _ in first.served} & {execution for execution, _ in second.served}
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.versions() == [1, 2]
    assert {group.step for group in ledger.groups("trained")} == {0, 1}
    ledger.close()
