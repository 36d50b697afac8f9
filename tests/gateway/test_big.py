"""Long sessions, huge messages, an event loop that is never held up."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gyre_sdk.testing import Say, ScriptedCall
from tests.dialects.speakers import Messages
from tests.gateway.conftest import make_rig

pytestmark = pytest.mark.anyio


def short(call: ScriptedCall) -> Say:
    return Say(f"ok {call.number}")


class Watch:
    """Measures for how long the event loop's thread was busy at a stretch, in its own CPU time: other load doesn't count."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._handle: asyncio.Handle | None = None

    def __enter__(self) -> Watch:
        self._loop = asyncio.get_running_loop()
        gc.collect()
        gc.freeze()  # what a thousand earlier tests left in memory is not the gateway's to walk through
        self._run = asyncio.Handle._run
        watch, original = self, asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> Any:
            started = time.thread_time()
            try:
                return original(handle)
            finally:
                watch.worst = max(watch.worst, time.thread_time() - started)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        gc.unfreeze()


async def test_a_tool_result_of_5_mb_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    line = "src/parser.py:12: the quick brown fox jumps over the lazy dog and prints the result\n"
    big = line * (5 * 2**20 // len(line))
    async with make_rig(tmp_path, short, context_length=10_000_000) as rig:
        rig.engine.decode_prompts = False
        client = Messages(rig.http, tools=False)
        await client.say("hi")
        client.user(big)
        body = json.dumps(client.body(False)).encode()
        with Watch() as watch:
            response = await rig.http.post("/v1/messages", content=body, timeout=110)
        assert response.status_code == 200
        client.read(response.json())
        await client.say("and now?")
        assert rig.graph.calls[2].rerender == ""
        assert rig.graph.call_length(1) > 1_000_000
        # The client of this test runs on the same loop; its own work on 5 MB is a part of this.
        assert watch.worst < 0.12


async def test_the_gateway_alone_never_blocks_for_20_ms(tmp_path: Path) -> None:
    """A tool result of 200 kB and a full render of 100 messages, without the test's client on the loop's back."""
    async with make_rig(tmp_path, short) as rig:
        rig.engine.decode_prompts = False
        client = Messages(rig.http, tools=False)
        for number in range(50):
            client.user(f"turn {number} " + "the file was created and the tests pass " * 60)
            client.history.append({"role": "assistant", "content": [{"type": "text", "text": "fine " * 50}]})
        client.user("the quick brown fox " * 10_000)
        body = json.dumps(client.body(False)).encode()
        with Watch() as watch:
            response = await rig.http.post("/v1/messages", content=body)
        assert response.status_code == 200
        assert watch.worst < 0.02


@pytest.mark.parametrize("calls", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_two_thousand_calls_in_one_execution(tmp_path: Path, calls: int) -> None:
    async with make_rig(tmp_path, short) as rig:
        rig.engine.decode_prompts = False
        messages: list[str] = ['{"role":"user","content":"go"}']
        for number in range(calls):
            body = ('{"messages":[' + ",".join(messages) + "]}").encode()
            response = await rig.http.post("/v1/chat/completions", content=body)
            assert response.status_code == 200
            messages.append(f'{{"role":"assistant","content":"ok {number}"}}')
            messages.append(f'{{"role":"user","content":"{number}"}}')
        await rig.check_replay()
        assert len(rig.graph.leaves()) == 1
        assert rig.handle.recorder.counters.rerenders == {}
