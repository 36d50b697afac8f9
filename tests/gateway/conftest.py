"""A gateway in front of a scripted engine, over real HTTP on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_sdk.capture.gateway import ExecutionHandle, ExecutionSpec, Gateway, GatewayConfig
from gyre_sdk.capture.model import ChatRenderer, Tool
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.capture.wal import read_records
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Fault, Say, Script, ScriptedEngine, in_turn, tiny_model_dir

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
BASH = Tool(
    "bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}, "a": {}, "b": {}}}
)
CHAT_TOOLS = [BASH.as_openai()]


@dataclass
class Rig:
    """Everything a test of the gateway touches."""

    gateway: Gateway
    engine: ScriptedEngine
    handle: ExecutionHandle
    http: httpx.AsyncClient
    renderer: ChatRenderer

    @property
    def graph(self) -> BranchGraph:
        return self.handle.graph

    async def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One chat completion; returns the assistant message."""
        response = await self.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, **fields})
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def check_replay(self) -> None:
        """The graph equals the replay of its log."""
        wal = self.handle.recorder._wal
        await wal.durable(wal.next_seq - 1)
        replayed = BranchGraph.replay(read_records(self.gateway.wal_path(self.handle.execution)))
        assert replayed.digest() == self.graph.digest()

    async def check(self) -> None:
        """What always holds: the graph equals its WAL's replay, and every call's tokens are what the engine saw and said."""
        wal = self.handle.recorder._wal
        if self.handle.recorder.sealed is None:
            await wal.durable(wal.next_seq - 1)
        records = list(read_records(self.gateway.wal_path(self.handle.execution)))
        replayed = BranchGraph.replay(records)
        for graph in (self.graph, replayed):
            by_rid = {entry.rid: entry for entry in self.engine.log}
            for call in graph.calls.values():
                if not call.done:
                    continue
                entry = by_rid[f"e{self.handle.execution}.c{call.number:06d}."]
                assert graph.path_tokens(call.number).tolist() == entry.input_ids + entry.output_ids
                assert call.output_ids.tolist() == entry.output_ids
                assert call.logprobs.tolist() == pytest.approx(entry.logprobs)
        if len(replayed.calls) == len(self.graph.calls):
            assert replayed.digest() == self.graph.digest()


def make_renderer(folder: Path, family: str = "template") -> ChatRenderer:
    if family == "template":
        return load_renderer(tiny_model_dir(folder))
    return load_renderer(tiny_model_dir(folder, template=None, special=QWEN_SPECIAL, added=QWEN_ADDED), family)


@asynccontextmanager
async def make_rig(
    folder: Path,
    replies: Script | Iterable[Say | Fault | str],
    *,
    config: GatewayConfig | None = None,
    family: str = "template",
    tools: Sequence[Tool] = (BASH,),
    spec: ExecutionSpec | None = None,
    **engine: Any,
) -> AsyncIterator[Rig]:
    renderer = make_renderer(folder / "model", family)
    script = replies if callable(replies) else in_turn(replies)
    fake = ScriptedEngine(renderer, script, tools=tools, **engine)
    # An engine that is gone for good is noticed soon in tests.
    gateway = Gateway(fake, renderer, folder / "run", config or GatewayConfig(resume_attempts=2))
    async with gateway.serving() as url:
        handle = await gateway.open(spec or ExecutionSpec(task="t"))
        headers = {"authorization": f"Bearer {handle.token}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
            yield Rig(gateway, fake, handle, http, renderer)


async def read_until_broken(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, Exception | None]:
    """A stream's text, and how it broke, if it did."""
    received = ""
    try:
        async with http.stream("POST", path, json=body) as response:
            async for chunk in response.aiter_text():
                received += chunk
    except httpx.TransportError as error:
        return received, error
    return received, None
