"""A gateway process that is killed: every live execution goes on in the next one, with the same key on the same port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from gyre_sdk.capture.wal import read_records
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine, ScriptedServer
from tests.gateway.conftest import make_renderer

pytestmark = pytest.mark.anyio

SERVER = """
import asyncio, sys
from pathlib import Path
from gyre_sdk.capture.gateway import ExecutionSpec, Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.sampling import SGLangClient

async def main(model, engine, run, port):
    gateway = Gateway(SGLangClient(engine), load_renderer(model), Path(run))
    handles = await gateway.recover()
    async with gateway.serving(port=int(port)):
        if not handles:
            handle = await gateway.open(ExecutionSpec(execution="00000000000a"))
            Path(run, "token").write_text(handle.token)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, engine: str, port: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", SERVER, str(folder / "model"), engine, str(folder / "run"), str(port)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert await anyio.to_thread.run_sync(process.stdout.readline) == b"ready\n"


async def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(process.wait)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


async def persistent_post(url: str, token: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """As a harness does: the same body again until there is an answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=30) as http:
                response = await http.post(f"{url}/v1/chat/completions", json={"messages": messages})
        except httpx.TransportError:
            await anyio.sleep(0.1)
            continue
        if response.status_code == 200:
            message: dict[str, Any] = response.json()["choices"][0]["message"]
            return message
        assert response.status_code in (429, 503), response.text
        await anyio.sleep(0.1)
    raise AssertionError("no answer in 60 s")


async def test_kill_and_restart_in_the_middle_of_a_session(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path / "model")

    def script(call: ScriptedCall) -> Say:
        return Say(f"reply {call.number} to that", chunk=2, delay=0.02)

    engine = ScriptedEngine(renderer, script)
    port = free_port()
    (tmp_path / "run").mkdir()
    async with ScriptedServer(engine).serving() as engine_url:
        process = start(tmp_path, engine_url, port)
        try:
            await ready(process)
            token = (tmp_path / "run" / "token").read_text()
            url = f"http://127.0.0.1:{port}"
            messages: list[dict[str, Any]] = [{"role": "user", "content": "start"}]
            for turn in range(6):
                if turn in (2, 4):
                    async with anyio.create_task_group() as group:
                        replies: list[dict[str, Any]] = []

                        async def ask(replies: list[dict[str, Any]] = replies) -> None:
                            replies.append(await persistent_post(url, token, messages))

                        group.start_soon(ask)
                        await anyio.sleep(0.08)
                        await kill(process)
                        process = start(tmp_path, engine_url, port)
                        await ready(process)
                    messages.append(replies[0])
                else:
                    messages.append(await persistent_post(url, token, messages))
                messages.append({"role": "user", "content": f"turn {turn}"})
        finally:
            await kill(process)
    graph = BranchGraph.replay(read_records(tmp_path / "run" / "executions" / "00000000000a" / "wal.gyre"))
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    leaf = next(leaf for leaf in graph.leaves() if leaf.num_tokens == max(other.num_tokens for other in graph.leaves()))
    sampled = [node.call for node in leaf.nodes if node.call >= 0]
    # The longest branch is made of the very replies that the harness got, in order, each sampled once.
    assert [
        renderer.decode(graph.calls[call].output_ids.tolist()).removesuffix("<|im_end|>") for call in sampled
    ] == said
    assert all(call.rerender == "" for call in graph.calls.values())
    log = {entry.rid: entry for entry in engine.log}
    for call in graph.calls.values():
        if call.done:
            entry = log[f"e00000000000a.c{call.number:06d}."]
            assert graph.path_tokens(call.number).tolist() == entry.input_ids + entry.output_ids
