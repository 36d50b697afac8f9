"""Random programs of turns, retries, forks, edits, compactions and failures, through the gateway's HTTP app.

Whatever a harness does: the graph passes its own checks, equals the replay of its log, and every finished call's tokens
are those that the engine saw and said.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.capture.gateway import ExecutionSpec, Gateway, GatewayConfig
from gyre_sdk.graph.checks import check_invariants
from gyre_sdk.testing import Fault, Say, ScriptedCall, ScriptedEngine
from gyre_sdk.wire.records import Outcome
from tests.gateway.conftest import BASH, CHAT_TOOLS, Rig, make_renderer

OPS = (
    "turn",
    "turn",
    "turn",
    "retry",
    "fork",
    "edit_user",
    "edit_reply",
    "compact",
    "arguments",
    "system",
    "fail",
    "pair",
)
RENDERER = make_renderer(Path(tempfile.mkdtemp(prefix="gyre-test-")))


class Program:
    """A harness that does what the seed says."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self.http = http
        self.random = random.Random(seed)
        self.conversations: list[list[dict[str, Any]]] = [[{"role": "user", "content": "start"}]]

    def reply(self, call: ScriptedCall) -> Say | Fault:
        """What the model says: also a function of the seed."""
        if self.random.random() < 0.08:
            return Fault(self.random.choice(["error", "overload", "gone"]), after=self.random.choice([0, 2]))
        tool = (("bash", '{"b": 1,  "a":"\u00e9"}'),) if self.random.random() < 0.4 else ()
        text = self.random.choice(["", "ok", " spaced \n", f"reply {call.number}", "caf\u00e9 \U0001f600"])
        cut = self.random.random() < 0.1
        return Say(
            text, calls=tool, odd_tokens=self.random.random() < 0.5, stop=not cut, chunk=self.random.choice([1, 5])
        )

    async def ask(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        response = await self.http.post("/v1/chat/completions", json={"messages": messages, "tools": CHAT_TOOLS})
        assert response.status_code in (200, 429, 503), response.text
        if response.status_code != 200:
            return None
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def turn(self, messages: list[dict[str, Any]]) -> None:
        message = await self.ask(messages)
        if message is None:
            return
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {len(messages)}"})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": f"go on {len(messages)}"})

    async def step(self, op: str) -> None:
        messages = self.random.choice(self.conversations)
        copy: list[dict[str, Any]] = json.loads(json.dumps(messages))
        if op in ("turn", "fail"):
            await self.turn(messages)
        elif op == "retry":
            await self.ask(messages)
        elif op == "pair":
            await asyncio.gather(self.turn(messages), self.turn(copy))
            self.conversations.append(copy)
        else:
            getattr(self, f"_{op}")(copy)
            self.conversations.append(copy)
            await self.turn(copy)

    def _fork(self, messages: list[dict[str, Any]]) -> None:
        messages[:] = [{"role": "system", "content": "You help."}, {"role": "user", "content": f"sub {len(messages)}"}]

    def _edit_user(self, messages: list[dict[str, Any]]) -> None:
        self.random.choice([m for m in messages if m["role"] == "user"])["content"] += "!"

    def _edit_reply(self, messages: list[dict[str, Any]]) -> None:
        said = [m for m in messages if m["role"] == "assistant"]
        if said:
            self.random.choice(said)["content"] = "changed"

    def _compact(self, messages: list[dict[str, Any]]) -> None:
        messages[:] = [{"role": "user", "content": f"summary of {len(messages)} messages"}, *messages[-1:]]
        if messages[-1]["role"] == "tool":
            messages.pop()

    def _arguments(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            for call in message.get("tool_calls") or ():
                value = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(value, sort_keys=True)

    def _system(self, messages: list[dict[str, Any]]) -> None:
        if messages[0]["role"] == "system":
            messages.pop(0)
        else:
            messages.insert(0, {"role": "system", "content": f"It is {self.random.randint(0, 9)}."})


async def run_program(seed: int, ops: list[str], matcher: Any, folder: Path) -> None:
    program: Program | None = None
    engine = ScriptedEngine(RENDERER, lambda call: program.reply(call) if program else Say("x"), tools=[BASH])
    config = GatewayConfig(matcher=matcher, resume_attempts=0)
    gateway = Gateway(engine, RENDERER, folder, config)
    handle = await gateway.open(ExecutionSpec())
    headers = {"authorization": f"Bearer {handle.token}"}
    transport = httpx.ASGITransport(app=gateway.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
        program = Program(http, seed)
        for op in ops:
            await program.step(op)
        rig = Rig(gateway, engine, handle, http, RENDERER)
        await rig.check()
        check_invariants(handle.graph)
        # A restarted gateway knows the same, and the harness goes on in the same places.
        before = handle.graph.digest()
        longest = max(program.conversations, key=len)
        await gateway.aclose()
    again = Gateway(ScriptedEngine(RENDERER, lambda call: Say("after")), RENDERER, folder, config)
    (recovered,) = await again.recover()
    assert recovered.graph.opened == handle.graph.opened
    old, new = handle.recorder.contexts, recovered.recorder.contexts
    assert {n: (c.prompt, c.after, c.truncated) for n, c in old.calls.items()} == {
        n: (c.prompt, c.after, c.truncated) for n, c in new.calls.items()
    }
    transport = httpx.ASGITransport(app=again.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
        program.http = http
        assert await program.ask(longest) is not None
    await again.seal(recovered.execution, Outcome(status="completed"))
    check_invariants(recovered.graph)
    assert before != recovered.graph.digest()
    await again.aclose()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ops=st.lists(st.sampled_from(OPS), min_size=3, max_size=14),
    matcher=st.sampled_from(["default", "strict", "role-and-content"]),
)
def test_random_programs(seed: int, ops: list[str], matcher: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_program(seed, ops, matcher, Path(folder)))
