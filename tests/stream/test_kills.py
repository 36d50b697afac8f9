"""kill -9 of the backend, again and again, while executions are streamed to it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from random import Random

import pytest

from gyre_sdk.capture.wal import Flusher
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.stream import FrameSender
from tests.stream.test_stream import log_of, program

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]


async def start(folder: Path, port: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.stream.backend",
        str(folder),
        str(port),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def stream_under_kills(tmp_path: Path, kills: int, calls: int, seed: int) -> None:
    random = Random(seed)
    port = free_port()
    backend = await start(tmp_path / "ingest", port)
    errors: list[Exception] = []
    programs = [program(f"{i:012x}", calls, 300) for i in range(8)]
    with Flusher(tmp_path / "journal.gyre") as flusher:
        async with FrameSender(f"http://127.0.0.1:{port}", "x", on_error=lambda e, x: errors.append(x)) as sender:

            async def write(records: list) -> None:  # type: ignore[type-arg]
                await asyncio.sleep(random.random())
                await log_of(tmp_path, flusher, records, sender)

            writing = [asyncio.create_task(write(records)) for records in programs]
            for _ in range(kills):
                await asyncio.sleep(random.random() * 0.5)
                backend.kill()
                await backend.wait()
                backend = await start(tmp_path / "ingest", port)
            await asyncio.gather(*writing)
            assert await sender.drain(60), sender.status()
            assert not errors
    backend.kill()
    await backend.wait()
    for records in programs:
        name = records[0].execution  # type: ignore[union-attr]
        loaded = load_graph(tmp_path / "ingest" / f"{name}.gyre")
        assert not loaded.problem
        assert loaded.graph.digest() == BranchGraph.replay(records).digest()


async def test_one_kill(tmp_path: Path) -> None:
    await stream_under_kills(tmp_path, kills=1, calls=20, seed=1)


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(4))
async def test_many_kills(tmp_path: Path, seed: int) -> None:
    await stream_under_kills(tmp_path, kills=15, calls=150, seed=seed)
