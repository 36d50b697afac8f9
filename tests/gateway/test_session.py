"""A harness in this process: scopes by ContextVar, told to the gateway by a header."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import gyre_sdk
from gyre_sdk.capture.wal import read_records
from gyre_sdk.errors import ConfigError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine
from tests.gateway.conftest import make_renderer, make_rig

pytestmark = pytest.mark.anyio


def numbered(call: ScriptedCall) -> Say:
    return Say(f"reply number {call.number} of the scripted model")


async def ask(http: Any, *texts: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    response = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def test_scopes_become_edges_and_roles(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path / "model")
    engine = ScriptedEngine(renderer, numbered)
    async with (
        gyre_sdk.session(engine=engine, model=renderer, run_dir=tmp_path / "run", task="t") as s,
        s.http() as http,
    ):
        main = await ask(http, "main task")

        async def subagent(name: str) -> None:
            with s.fork():
                reply = await ask(http, f"sub task {name}")
                await ask(http, f"sub task {name}", reply, "go on")

        await asyncio.gather(subagent("one"), subagent("two"))
        with s.compact():
            summary = await ask(http, "main task", main, "write it all down")
        await ask(http, "short: " + summary)
        with s.retry():
            await ask(http, "short, differently: " + summary)
        s.finish(reward=0.5, metrics={"passed": 1})
        graph = s.graph
    assert graph.outcome is not None
    assert (graph.outcome.reward, graph.outcome.valid) == (0.5, True)
    links = {(link.kind, link.source, link.inferred) for link in graph.links()}
    assert ("forks", 0, False) in links
    assert sum(1 for link in graph.links() if link.kind == "forks") == 2
    summary_call = next(call for call in graph.calls if graph.role_of_call(call) == "main-summary")
    after = [link for link in graph.links() if link.kind == "compacts"]
    assert [(link.source, link.inferred) for link in after] == [(summary_call, False)]
    assert [(link.source, link.target) for link in graph.links() if link.kind == "retries"] == [(after[0].target, 7)]
    roles = sorted(leaf.role for leaf in graph.leaves())
    assert roles == ["main", "main", "main-summary", "subagent", "subagent"]
    records = read_records(tmp_path / "run" / "executions" / s.execution / "wal.gyre")
    assert BranchGraph.replay(records).digest() == graph.digest()


async def test_a_harness_that_breaks_is_an_outcome(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path / "model")
    engine = ScriptedEngine(renderer, numbered)
    graphs: list[BranchGraph] = []

    async def break_it() -> None:
        async with gyre_sdk.session(engine=engine, model=renderer, run_dir=tmp_path / "run") as s:
            graphs.append(s.graph)
            raise RuntimeError("broken harness")

    with pytest.raises(RuntimeError, match="broken"):
        await break_it()
    graph = graphs[0]
    assert graph.outcome is not None
    assert graph.outcome.status == "harness_error"
    assert not graph.outcome.valid


async def test_wrong_combinations_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a gateway"):
        async with gyre_sdk.session():
            pass


async def test_what_follows_a_retry_follows_from_the_second_reply(tmp_path: Path) -> None:
    async with (
        make_rig(tmp_path, ["first", "second", "helper", "more"]) as rig,
        gyre_sdk.session(gateway=rig.gateway) as s,
    ):
        async with s.http() as http:

            async def ask(text: str) -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200

            await ask("go")
            with s.retry():
                await ask("go")
            with s.fork():
                await ask("help")
        found = {(link.kind, link.source, link.target) for link in s.graph.links()}
        assert found == {("retries", 0, 1), ("forks", 1, 2)}
