"""The gateway as a process that is watched: killed, it comes back on its port and goes on with every execution."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.wal import read_records
from gyre_sdk.cli.gateway import watched
from gyre_sdk.errors import ConfigError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.serving import GatewayProcess, GatewaySettings, Tls
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine, ScriptedServer
from gyre_sdk.wire.records import Outcome
from tests.gateway.conftest import make_renderer
from tests.gateway.test_restart import persistent_post

pytestmark = pytest.mark.anyio
DONE = Outcome(status="completed", reward=1.0, valid=True)


@asynccontextmanager
async def settings(folder: Path, **changes: Any) -> AsyncIterator[tuple[GatewaySettings, ScriptedEngine]]:
    renderer = make_renderer(folder / "model")

    def script(call: ScriptedCall) -> Say:
        return Say("an answer that is said in many small pieces", chunk=1, delay=0.02)

    engine = ScriptedEngine(renderer, script)
    async with ScriptedServer(engine).serving() as url:
        run, model = str(folder / "run"), str(folder / "model")
        yield GatewaySettings(run_dir=run, model_dir=model, engine_url=url, **changes), engine


def kill(gateway: GatewayProcess) -> None:
    assert gateway.pid is not None
    os.kill(gateway.pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def replay(folder: Path, execution: str) -> BranchGraph:
    return BranchGraph.replay(read_records(folder / "run" / "executions" / execution / "wal.gyre"))


async def test_killed_in_mid_reply_it_goes_on(tmp_path: Path) -> None:
    async with settings(tmp_path) as (wanted, _), GatewayProcess(wanted) as gateway:
        opened = await gateway.open(ExecutionSpec(task="t"))
        port, first = gateway.port, gateway.pid
        assert first is not None
        replies: list[dict[str, Any]] = []

        async def harness() -> None:
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"turn {turn}"})
                messages.append(await persistent_post(gateway.base_url, opened.token, messages))
            replies.extend(messages)

        async with anyio.create_task_group() as group:
            group.start_soon(harness)
            await anyio.sleep(0.3)
            os.kill(first, signal.SIGKILL)
        assert gateway.restarts == 1
        assert gateway.port == port
        assert gateway.pid not in (None, first)
        assert (await gateway.status()).executions == [opened.execution]
        await gateway.seal(opened.execution, DONE)
        await gateway.seal(opened.execution, DONE)
        with pytest.raises(ConfigError, match="another outcome"):
            await gateway.seal(opened.execution, Outcome(status="timeout"))
        last = gateway.pid
        assert last is not None
    assert gone(last)
    graph = replay(tmp_path, opened.execution)
    assert graph.outcome == DONE
    assert [call.state for call in graph.calls.values()] == ["done"] * 3
    assert all(call.delivered for call in graph.calls.values())
    assert len(graph.leaves()) == 1
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/healthz")


async def test_orders_survive_a_death(tmp_path: Path) -> None:
    async with settings(tmp_path) as (wanted, _), GatewayProcess(wanted) as gateway:
        for number in range(2):
            kill(gateway)
            opened = await gateway.open(ExecutionSpec(execution=f"{number:012x}"))
            assert opened.token
        assert (await gateway.status()).executions == [f"{number:012x}" for number in range(2)]


async def test_what_an_earlier_run_left_open_is_kept_or_cancelled(tmp_path: Path) -> None:
    async with settings(tmp_path) as (wanted, _):
        async with GatewayProcess(wanted) as gateway:
            opened = await gateway.open(ExecutionSpec())
        async with GatewayProcess(wanted) as gateway:
            assert gateway.recovered == [opened.execution]
            reply = await persistent_post(gateway.base_url, opened.token, [{"role": "user", "content": "still there?"}])
            assert reply["content"].startswith("an answer")
        cancel = GatewaySettings(
            run_dir=wanted.run_dir, model_dir=wanted.model_dir, engine_url=wanted.engine_url, unsealed="cancel"
        )
        async with GatewayProcess(cancel) as gateway:
            assert (await gateway.status()).executions == []
            async with httpx.AsyncClient(headers={"x-api-key": opened.token}) as http:
                late = await http.post(f"{gateway.base_url}/v1/chat/completions", json={"messages": []})
            assert late.status_code == 410
    outcome = replay(tmp_path, opened.execution).outcome
    assert outcome is not None
    assert outcome.status == "cancelled"


async def test_a_gateway_that_can_not_start_ends_the_block_with_its_reason(tmp_path: Path) -> None:
    async with settings(tmp_path) as (wanted, _):
        with pytest.raises(ConfigError, match="tokenizer"):
            async with GatewayProcess(
                GatewaySettings(run_dir=wanted.run_dir, model_dir="/nowhere", engine_url="http://x")
            ):
                pass
        with pytest.raises(ConfigError, match="tokenizer"):
            await lose_the_model(wanted, tmp_path / "model")


async def lose_the_model(wanted: GatewaySettings, model: Path) -> None:
    async with watched(GatewayProcess(wanted)) as gateway:
        (model / "tokenizer.json").unlink()
        kill(gateway)
        await anyio.sleep(60)


async def test_only_the_owner_opens_and_seals(tmp_path: Path) -> None:
    async with settings(tmp_path) as (wanted, _), GatewayProcess(wanted) as gateway:
        opened = await gateway.open(ExecutionSpec())
        async with httpx.AsyncClient(base_url=gateway.base_url) as http:
            for token in ("x", opened.token, "ä" * 20):
                headers = {"authorization": f"Bearer {token}".encode()}
                for method, path in (("POST", "executions"), ("POST", "executions/x/seal"), ("GET", "status")):
                    assert (await http.request(method, f"/gyre/v1/{path}", headers=headers)).status_code == 401
            headers = {"authorization": f"Bearer {gateway.admin_token}".encode()}
            for body in (
                b"",
                b"[]",
                b'{"execution": "../../etc"}',
                b'{"token": "short"}',
                b"\xff" * 100,
                b"x" * 2**20 * 2,
            ):
                answer = await http.post("/gyre/v1/executions", content=body, headers=headers)
                assert answer.status_code == 409, body[:20]
                assert answer.json()["error"]
    assert gateway.admin_token not in (tmp_path / "run" / "gateway.log").read_text()


async def test_other_interfaces_want_tls_and_tokens(tmp_path: Path, certificate: Tls) -> None:
    async with settings(tmp_path) as (wanted, _):
        fields = {"run_dir": wanted.run_dir, "model_dir": wanted.model_dir, "engine_url": wanted.engine_url}
        for tls, token in ((None, ""), (None, "t" * 32), (certificate, "")):
            with pytest.raises(ConfigError, match="loopback"):
                GatewayProcess(GatewaySettings(host="0.0.0.0", tls=tls, admin_token=token, **fields))
        with pytest.raises(ConfigError, match="no usable certificate"):
            GatewayProcess(GatewaySettings(host="0.0.0.0", tls=Tls("/no", "/no"), admin_token="t" * 32, **fields))
        safe = GatewaySettings(host="0.0.0.0", tls=certificate, admin_token="t" * 32, **fields)
        async with GatewayProcess(safe) as gateway:
            opened = await gateway.open(ExecutionSpec())
            url = f"https://127.0.0.1:{gateway.port}/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "hello"}]}
            trust = ssl.create_default_context(cafile=certificate.cert)
            async with httpx.AsyncClient(verify=trust, timeout=30) as http:
                assert (await http.post(url, json=body)).status_code == 401
                answer = await http.post(url, json=body, headers={"x-api-key": opened.token})
                assert answer.status_code == 200
                with pytest.raises(httpx.TransportError):
                    await http.get(url.replace("https", "http"))


async def test_a_damaged_log_stops_one_execution(tmp_path: Path) -> None:
    async with settings(tmp_path, config=GatewayConfig(partial_every_s=None)) as (wanted, _):
        async with GatewayProcess(wanted) as gateway:
            opened = [await gateway.open(ExecutionSpec()) for _ in range(2)]
            for one in opened:
                for word in ("hello", "again"):
                    await persistent_post(gateway.base_url, one.token, [{"role": "user", "content": word}])
        log = tmp_path / "run" / "executions" / opened[0].execution / "wal.gyre"
        data = bytearray(log.read_bytes())
        data[len(data) // 2] ^= 0x10
        log.write_bytes(data)
        async with GatewayProcess(wanted) as gateway:
            status = await gateway.status()
            assert status.executions == [opened[1].execution]
            assert "damaged at byte" in status.damaged[opened[0].execution]
            async with httpx.AsyncClient(headers={"x-api-key": opened[0].token}) as http:
                answer = await http.post(f"{gateway.base_url}/v1/chat/completions", json={"messages": []})
            assert answer.status_code == 410
            assert "damaged" in answer.text
            await gateway.seal(opened[0].execution, DONE)
            await persistent_post(gateway.base_url, opened[1].token, [{"role": "user", "content": "third"}])
    assert log.read_bytes() == data
