"""A gateway process that is killed: every live execution goes on in the next one, with the same key on the same port."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from gyre_sdk.capture.gateway import TOKEN_META, ExecutionSpec, Gateway, GatewayConfig
from gyre_sdk.capture.wal import Flusher, Wal, read_records
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine, ScriptedServer
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Intent, Opened, Outcome, Partial, Span
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
    # A call that was interrupted was asked for again, under a name of its own: its last attempt is what counts.
    log = {entry.rid[: len("e00000000000a.c000000.")]: entry for entry in engine.log}
    for call in graph.calls.values():
        entry = log[f"e00000000000a.c{call.number:06d}."]
        assert graph.path_tokens(call.number).tolist() == entry.input_ids + entry.output_ids


PARTIAL = GatewayConfig(partial_every_s=0.0, orphan_grace_s=60)


@pytest.mark.parametrize("end", ["killed", "stopped"])
async def test_an_interrupted_reply_is_continued_from_its_partial_tokens(tmp_path: Path, end: str) -> None:
    """`killed`: the next gateway finds the folder as it was in mid-reply."""
    renderer = make_renderer(tmp_path / "model")
    whole = Say("a long reply that takes its time to be said, word by word by word", chunk=1, delay=0.03)
    engine = ScriptedEngine(renderer, lambda call: replace(whole, skip=len(call.input_ids) - start if start else 0))
    gateway = Gateway(engine, renderer, tmp_path / "run", PARTIAL)
    start = 0
    messages = [{"role": "user", "content": "go on"}]
    async with gateway.serving() as url:
        handle = await gateway.open(ExecutionSpec(execution="00000000000b"))
        async with anyio.create_task_group() as group:
            group.start_soon(persistent_post_once, url, handle.token, messages)
            while not engine.log or len(engine.log[0].output_ids) < 6:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            start = len(engine.log[0].input_ids)
            if end == "killed":
                await handle.recorder.durable(handle.recorder._wal.next_seq - 1)
            else:
                await gateway.aclose()
            shutil.copytree(tmp_path / "run", tmp_path / "next")
            group.cancel_scope.cancel()
    again = Gateway(engine, renderer, tmp_path / "next", PARTIAL)
    (recovered,) = await again.recover()
    kept = len(recovered.graph.calls[0].output_ids)
    assert 5 <= kept < len(engine.ids_of(whole))
    async with again.serving() as url:
        reply = await persistent_post(url, handle.token, messages)
        graph = recovered.graph
        assert reply["content"] == whole.text
        assert [e.data for e in graph.events if e.name == "resumed"] == [
            {"call": 0, "tokens": kept, "how": "continued"}
        ]
        assert graph.calls[0].output_ids.tolist() == engine.ids_of(whole)
        # The engine was told what had been said, and said the rest, with logprobs of the right positions.
        assert engine.log[-1].rid == "e00000000000b.c000000.100."
        assert engine.log[-1].input_ids == engine.log[0].input_ids + engine.ids_of(whole)[:kept]
        positions = [engine.logprob(id_, start + i) for i, id_ in enumerate(engine.ids_of(whole))]
        assert graph.calls[0].logprobs.tolist() == pytest.approx(positions)
        assert graph.calls[0].versions == (Span(1, 0, len(engine.ids_of(whole))),)
        await again.seal("00000000000b", Outcome(status="completed"))
    replayed = BranchGraph.replay(read_records(tmp_path / "next" / "executions" / "00000000000b" / "wal.gyre"))
    assert replayed.digest() == graph.digest()


async def test_what_nobody_asks_for_again_ends_with_the_execution(tmp_path: Path) -> None:
    """And a reply whose last token was on disk is not sampled further."""
    renderer = make_renderer(tmp_path / "model")
    engine = ScriptedEngine(renderer, lambda call: Say("never said"))
    whole = engine.ids_of(Say("said already"))
    (tmp_path / "run").mkdir()
    with Flusher() as flusher:
        for execution, ids in (("00000000000c", whole[:2]), ("00000000000d", whole)):
            wal = Wal.create(tmp_path / "run" / "executions" / execution / "wal.gyre", flusher)
            meta = {TOKEN_META: hashlib.sha256(execution.encode()).hexdigest()}
            wal.append(Opened(execution=execution, at=1.0, meta=meta))
            request = {"messages": [{"role": "user", "content": "go on"}]}
            source = Gateway(engine, renderer, tmp_path / execution, PARTIAL)
            async with source.serving() as url:
                handle = await source.open(ExecutionSpec(execution=execution))
                await persistent_post(url, handle.token, request["messages"])
                stored = list(read_records(source.wal_path(execution)))
            (intent,) = [record for record in stored if isinstance(record, Intent)]
            wal.append(intent)
            logprobs = pack_floats(np.zeros(len(ids), np.float32))
            span = (Span(3, 0, len(ids)),)
            wal.append(Partial(call=0, at=2.0, start=0, ids=pack_ids(ids), logprobs=logprobs, versions=span))
            await wal.close()
    engine.log.clear()
    gateway = Gateway(engine, renderer, tmp_path / "run", PARTIAL)
    unasked, finished = await gateway.recover()
    async with gateway.serving() as url:
        reply = await persistent_post(url, "00000000000d", [{"role": "user", "content": "go on"}])
        assert reply["content"] == "said already"
        assert not engine.log
        assert finished.graph.calls[0].finish == "stop"
        assert finished.graph.calls[0].versions == (Span(3, 0, len(whole)),)
        await gateway.seal("00000000000c", Outcome(status="timeout"))
    assert unasked.graph.calls[0].state == "failed"
    assert unasked.graph.calls[0].output_ids.tolist() == whole[:2]
    assert not unasked.graph.nodes


async def persistent_post_once(url: str, token: str, messages: list[dict[str, Any]]) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=30) as http:
        with contextlib.suppress(httpx.TransportError):
            await http.post(f"{url}/v1/chat/completions", json={"messages": messages})


async def test_an_execution_that_is_sealed_the_moment_its_call_is_resumed(tmp_path: Path) -> None:
    """The task that goes on with the call is cancelled before it has run at all: the call must end all the same."""
    renderer = make_renderer(tmp_path / "model")
    engine = ScriptedEngine(renderer, lambda call: Say("slow", first_delay=30))
    gateway = Gateway(engine, renderer, tmp_path / "run", PARTIAL)
    async with gateway.serving() as url:
        handle = await gateway.open(ExecutionSpec(execution="00000000000e"))
        async with anyio.create_task_group() as group:
            group.start_soon(persistent_post_once, url, handle.token, [{"role": "user", "content": "go"}])
            while not engine.log:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await gateway.aclose()
    again = Gateway(engine, renderer, tmp_path / "run", PARTIAL)
    (recovered,) = await again.recover()
    recorder = recovered.recorder
    (call,) = recorder.live.values()
    recorder._answer_again(call)
    await again.seal("00000000000e", Outcome(status="harness_error"))
    assert recovered.graph.calls[0].state == "failed"
    assert len(engine.log) == 1
    await again.aclose()
