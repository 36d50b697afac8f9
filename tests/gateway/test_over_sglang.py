"""The whole way: gateway, SGLang client, HTTP engine. Tokens, streaming and faults arrive as over a real engine."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gyre_sdk.capture.gateway import ExecutionSpec, Gateway
from gyre_sdk.sampling import SGLangClient
from gyre_sdk.testing import Fault, Say, ScriptedEngine, ScriptedServer, in_turn
from tests.dialects.speakers import SPEAKERS, Speaker
from tests.gateway.conftest import BASH, Rig, make_renderer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda s: s.name)
async def test_a_session_over_http(tmp_path: Path, speaker: type[Speaker]) -> None:
    renderer = make_renderer(tmp_path / "model")
    replies = [
        Say("Look.", calls=(("bash", '{"command":  "ls"}'),), chunk=3),
        Fault("overload"),
        Say("Done \u00fc\U0001f600.", odd_tokens=True, chunk=1),
    ]
    engine = ScriptedEngine(renderer, in_turn(replies), tools=[BASH])
    async with ScriptedServer(engine).serving() as engine_url:
        client = SGLangClient(engine_url)
        gateway = Gateway(client, renderer, tmp_path / "run")
        async with gateway.serving() as url:
            handle = await gateway.open(ExecutionSpec())
            headers = {"authorization": f"Bearer {handle.token}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
                harness = speaker(http)
                heard = await harness.say("go", stream=True)
                harness.results(heard, ["a.txt"])
                busy = await http.post(harness.url(False), json=harness.body(False))
                assert busy.status_code == 429
                heard = await harness.say(stream=True)
                assert heard.text == "Done \u00fc\U0001f600."
                await Rig(gateway, engine, handle, http, renderer).check()
        await client.aclose()
    assert [call.state for call in handle.graph.calls.values()] == ["done", "failed", "done"]
    assert handle.graph.calls[2].versions[0].version == 1


async def test_an_engine_that_dies_in_mid_stream_is_continued(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path / "model")
    whole = Say("one two three four five six seven eight")
    probe = ScriptedEngine(renderer, in_turn(["x"]))
    rest = renderer.decode(probe.ids_of(whole)[8:-1])
    engine = ScriptedEngine(renderer, in_turn([Fault("gone", after=8, say=whole), Say(rest)]))
    async with ScriptedServer(engine).serving() as engine_url:
        client = SGLangClient(engine_url)
        gateway = Gateway(client, renderer, tmp_path / "run")
        async with gateway.serving() as url:
            handle = await gateway.open(ExecutionSpec())
            headers = {"authorization": f"Bearer {handle.token}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
                heard = await SPEAKERS[1](http).say("go", stream=True)
        await client.aclose()
    assert heard.text == whole.text
    assert handle.graph.calls[0].output_ids.tolist() == probe.ids_of(whole)
