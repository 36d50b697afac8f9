"""Disks that are slow, full, read-only or broken, and clocks that jump: calls fail clearly, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.capture.wal import read_records, verify
from gyre_sdk.errors import StorageError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.serving import GatewayProcess, GatewaySettings
from gyre_sdk.testing import Say, ScriptedEngine, ScriptedServer
from gyre_sdk.wire.records import Intent, Outcome, Result
from tests.faults.disks import Disk
from tests.gateway.conftest import Rig, make_renderer, make_rig

pytestmark = pytest.mark.anyio


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(rig: Rig, text: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    return await rig.http.post(path, json={"messages": [user(text)], **fields})


@pytest.mark.parametrize("fault", ["full", "read-only", "broken"])
async def test_calls_fail_while_nothing_can_be_kept_and_go_on_after(tmp_path: Path, disk: Disk, fault: str) -> None:
    async with make_rig(tmp_path, [Say("fine")]) as rig:
        assert (await ask(rig, "one")).status_code == 200
        disk.room = 40 if fault == "full" else None
        disk.error = {"read-only": errno.EROFS, "broken": errno.EIO}.get(fault)
        asked = len(rig.engine.log)
        refused = await ask(rig, "two")
        assert refused.status_code == 507
        assert os.strerror(disk.error or errno.ENOSPC) in refused.json()["error"]["message"]
        shape = await ask(rig, "two", "/v1/messages", max_tokens=10)
        assert (shape.status_code, shape.json()["type"]) == (507, "error")
        assert len(rig.engine.log) == asked, "the engine is not asked for what can't be recorded"
        with pytest.raises(StorageError):
            await rig.gateway.open(ExecutionSpec())
        assert verify(rig.gateway.wal_path(rig.handle.execution)).ok
        disk.room = disk.error = None
        assert (await ask(rig, "two")).status_code == 200
        await rig.check()
        await rig.gateway.seal(rig.handle.execution, Outcome(status="completed"))
        done = [call.number for call in rig.graph.calls.values() if call.done]
        assert len(done) == 2
        await rig.check()


async def test_a_result_that_can_not_be_kept_is_not_handed_over(tmp_path: Path, disk: Disk) -> None:
    """The disk fills while the engine works: the harness gets an error instead of a reply that would be lost."""
    async with make_rig(tmp_path, [Say("never heard of", delay=0.1), Say("heard")]) as rig:
        async with anyio.create_task_group() as group:
            answers: list[httpx.Response] = []

            async def call() -> None:
                answers.append(await ask(rig, "one"))

            group.start_soon(call)
            while not rig.engine.log:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            await anyio.sleep(0.05)
            disk.room = 0
        assert answers[0].status_code == 507
        disk.room = None
        again = await ask(rig, "one")
        assert again.status_code == 200
        await rig.gateway.seal(rig.handle.execution, Outcome(status="completed"))
        await rig.check()


async def test_a_slow_disk_slows_calls_and_nothing_else(tmp_path: Path, disk: Disk) -> None:
    async with make_rig(tmp_path, [Say("fine")]) as rig:
        disk.sync_s = 0.3
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(ask, rig, f"call {number}")
            beats = 0
            while sum(call.done for call in rig.graph.calls.values()) < 6:
                beats += (await rig.http.get("/healthz")).status_code == 200
        assert beats > 2, "the gateway answers while the disk is busy"
        disk.sync_s = 0.0
        assert sum(call.done for call in rig.graph.calls.values()) == 6
        await rig.check()


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Also across a restart: times never run backwards, and waits take as long as they took."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    async with make_rig(tmp_path, [Say("fine")]) as rig:
        await ask(rig, "one")
        shift[0] = jump
        assert (await ask(rig, "two")).status_code == 200
        await rig.gateway.aclose()
        shift[0] = 2 * jump
        again = Gateway(rig.engine, rig.renderer, tmp_path / "run")
        (handle,) = await again.recover()
        async with again.serving() as url, httpx.AsyncClient(base_url=url, headers=rig.http.headers) as http:
            answer = await http.post("/v1/chat/completions", json={"messages": [user("three")]})
            assert answer.status_code == 200
            await again.seal(handle.execution, Outcome(status="completed"))
        records = list(read_records(rig.gateway.wal_path(handle.execution)))
    times = [record.at for record in records]
    assert times == sorted(times)
    began = {record.call: record.at for record in records if isinstance(record, Intent)}
    for record in records:
        if isinstance(record, Result):
            assert record.at - began[record.call] < 3600
    assert BranchGraph.replay(records).digest() == handle.graph.digest()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "gyre-test", str(folder)], check=False)
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


async def test_a_full_file_system_under_a_gateway_process(tmp_path: Path, small_disk: Path) -> None:
    """A real one: calls and seals wait for room, a restart on the full disk changes nothing, then all goes on."""
    engine = ScriptedEngine(make_renderer(tmp_path / "model"), lambda call: Say("words " * 50, chunk=100))
    async with ScriptedServer(engine).serving() as url:
        run = str(small_disk / "run")
        settings = GatewaySettings(run_dir=run, model_dir=str(tmp_path / "model"), engine_url=url)
        async with GatewayProcess(settings, log_file=tmp_path / "gateway.log") as gateway:
            opened = await gateway.open(ExecutionSpec())
            headers = {"x-api-key": opened.token}
            async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=30) as http:

                async def call(text: str) -> int:
                    return (await http.post("/v1/chat/completions", json={"messages": [user(text)]})).status_code

                assert await call("first") == 200
                ballast = small_disk / "ballast"
                fill(ballast)
                # The page that the log has begun still takes a little.
                codes = [await call(f"call {number} " + "x" * 4000) for number in range(3)]
                assert codes[-1] == 507, codes
                async with anyio.create_task_group() as group:
                    group.start_soon(gateway.seal, opened.execution, Outcome(status="completed"))
                    await anyio.sleep(0.5)
                    ballast.unlink()
    log = small_disk / "run" / "executions" / opened.execution / "wal.gyre"
    assert verify(log).ok
    graph = BranchGraph.replay(read_records(log))
    assert graph.outcome == Outcome(status="completed")
    assert sum(call.done for call in graph.calls.values()) == codes.count(200) + 1
    assert all(call.done or call.state == "failed" for call in graph.calls.values())


@pytest.mark.parametrize("end", ["seal", "close"])
async def test_an_execution_that_ends_while_an_intent_is_on_its_way(tmp_path: Path, disk: Disk, end: str) -> None:
    """The disk is slow, the harness is killed, the execution is sealed: the call never reaches the engine."""
    async with make_rig(tmp_path, [Say("never said")]) as rig:
        disk.sync_s = 0.3
        async with anyio.create_task_group() as group:
            group.start_soon(ask, rig, "one")
            while not rig.graph.calls:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            if end == "seal":
                await rig.gateway.seal(rig.handle.execution, Outcome(status="harness_error"))
            else:
                await rig.gateway.aclose()
        await anyio.sleep(0.2)
        assert not rig.engine.log
        state = rig.graph.calls[0].state
        assert state == ("failed" if end == "seal" else "pending")
        records = list(read_records(rig.gateway.wal_path(rig.handle.execution)))
        assert BranchGraph.replay(records).digest() == rig.graph.digest()
