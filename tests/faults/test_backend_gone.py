"""A backend that is not there: calls go on, memory does not grow, and when it comes it gets everything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.capture.wal import read_records
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.serving import GatewayProcess, GatewaySettings
from gyre_sdk.testing import Say, ScriptedEngine, ScriptedServer
from gyre_sdk.wire.records import Outcome
from tests.faults.world import Service, listening
from tests.gateway.conftest import make_renderer
from tests.gateway.test_restart import persistent_post

pytestmark = pytest.mark.anyio


def resident_mib(pid: int) -> float:
    """Highest resident memory so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60, marks=[pytest.mark.faults, pytest.mark.timeout(300)])])
async def test_gone_then_back(tmp_path: Path, seconds: float) -> None:
    with listening() as free:
        port = free.getsockname()[1]
    engine = ScriptedEngine(make_renderer(tmp_path / "model"), lambda call: Say("words " * 40, chunk=100))
    async with ScriptedServer(engine).serving() as url:
        settings = GatewaySettings(
            run_dir=str(tmp_path / "run"),
            model_dir=str(tmp_path / "model"),
            engine_url=url,
            backend=(f"http://127.0.0.1:{port}", "x"),
        )
        async with GatewayProcess(settings) as gateway:
            opened = [await gateway.open(ExecutionSpec()) for _ in range(4)]
            assert gateway.pid is not None
            until = time.monotonic() + seconds
            before = [0.0]

            async def talk(token: str) -> None:
                messages: list[dict[str, Any]] = []
                while time.monotonic() < until:
                    # A new conversation now and then: the graph itself must not be what grows.
                    messages = messages[-8:] if len(messages) > 20 else messages
                    messages.append({"role": "user", "content": f"turn {len(messages)}"})
                    messages.append(await persistent_post(gateway.base_url, token, messages))
                    before[0] = before[0] or resident_mib(gateway.pid or 0)

            async with anyio.create_task_group() as group:
                for one in opened:
                    group.start_soon(talk, one.token)
            status = await gateway.status()
            behind = sum(log.stat().st_size for log in (tmp_path / "run").glob("executions/*/wal.gyre"))
            assert status.stream_error
            assert status.behind_bytes > 0.9 * (behind - 4096)
            assert resident_mib(gateway.pid) - before[0] < 100
            for one in opened:
                await gateway.seal(one.execution, Outcome(status="completed"))
            async with Service("tests.stream.backend", tmp_path / "ingest", port):
                assert await gateway.drain(60)
                assert (await gateway.status()).behind_bytes == 0
    for one in opened:
        log = tmp_path / "run" / "executions" / one.execution / "wal.gyre"
        assert log.with_suffix(".streamed").exists()
        taken = load_graph(tmp_path / "ingest" / f"{one.execution}.gyre")
        assert taken.graph.digest() == BranchGraph.replay(read_records(log)).digest()
