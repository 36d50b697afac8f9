"""What must hold in every dialect, streamed and not: exact tokens, one lineage, honest usage, errors as clients know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_sdk.capture.config import GatewayConfig
from gyre_sdk.testing import Fault, Say
from tests.dialects.speakers import SPEAKERS, Messages, Speaker
from tests.gateway.conftest import make_rig, read_until_broken

pytestmark = pytest.mark.anyio
every_dialect = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda s: s.name)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@every_dialect
@streamed_or_not
async def test_a_session_with_tools_is_one_lineage(tmp_path: Path, speaker: type[Speaker], stream: bool) -> None:
    calls = (("bash", '{"b":1,  "a":false}'), ("bash", '{"command":"pwd"}'))
    replies = [
        Say("  I look \u00e9\U0001f600.", calls=calls, chunk=1),
        Say("", calls=(("bash", '{ "command" : "ls" }'),)),
        Say("All done."),
        Say("Bye", odd_tokens=True),
        Say("end"),
    ]
    async with make_rig(tmp_path, replies) as rig:
        client = speaker(rig.http)
        first = await client.say("list files", stream=stream)
        assert first.text.strip() == "I look \u00e9\U0001f600."
        assert [(name, arguments) for _, name, arguments in first.calls] == [
            ("bash", {"b": 1, "a": False}),
            ("bash", {"command": "pwd"}),
        ]
        assert first.finish == "calls"
        client.results(first, ["result one", "result two \u00fc"])
        second = await client.say(stream=stream)
        assert second.calls[0][2] == {"command": "ls"}
        client.results(second, ["x"])
        third = await client.say(stream=stream)
        assert (third.text, third.finish) == ("All done.", "stop")
        await client.say("more", stream=stream)
        await client.say("and more", stream=stream)
        await rig.check()
        assert [call.rerender for call in rig.graph.calls.values()] == [""] * 5
        assert len(rig.graph.leaves()) == 1
        assert all(call.delivered for call in rig.graph.calls.values())
        assert first.prompt_tokens == len(rig.engine.log[0].input_ids)
        assert first.output_tokens == len(rig.engine.log[0].output_ids)


@every_dialect
@streamed_or_not
async def test_reasoning_comes_back_within_a_tool_cycle(tmp_path: Path, speaker: type[Speaker], stream: bool) -> None:
    replies = [
        Say("Look.", reasoning="I should list.", calls=(("bash", '{"command": "ls"}'),)),
        Say("ok", reasoning="fine"),
    ]
    async with make_rig(tmp_path, replies, family="qwen3") as rig:
        client = speaker(rig.http)
        heard = await client.say("list files", stream=stream)
        assert heard.reasoning.strip() == "I should list."
        assert heard.text.strip() == "Look."
        client.results(heard, ["a.txt"])
        heard = await client.say(stream=stream)
        assert heard.reasoning.strip() == "fine"
        await rig.check()
        assert [call.rerender for call in rig.graph.calls.values()] == ["", ""]
        assert len(rig.graph.leaves()) == 1


@every_dialect
@streamed_or_not
async def test_a_truncated_reply_says_so(tmp_path: Path, speaker: type[Speaker], stream: bool) -> None:
    async with make_rig(tmp_path, [Say("cut off", stop=False)]) as rig:
        heard = await speaker(rig.http).say("go", stream=stream)
        assert heard.finish == "length"
        assert rig.graph.calls[0].finish == "length"


@every_dialect
@streamed_or_not
async def test_an_empty_reply_is_a_reply(tmp_path: Path, speaker: type[Speaker], stream: bool) -> None:
    async with make_rig(tmp_path, [Say(""), Say("now")]) as rig:
        client = speaker(rig.http)
        heard = await client.say("go", stream=stream)
        assert (heard.text, heard.finish) == ("", "stop")
        heard = await client.say("again", stream=stream)
        assert heard.text == "now"
        await rig.check()
        assert len(rig.graph.leaves()) == 1


ERROR_TYPES: dict[str, dict[int, Any]] = {
    "chat": {401: "authentication_error", 429: "rate_limit_error", 400: "invalid_request_error"},
    "responses": {401: "authentication_error", 429: "rate_limit_error", 400: "invalid_request_error"},
    "messages": {401: "authentication_error", 429: "rate_limit_error", 400: "invalid_request_error"},
    "gemini": {401: "UNAUTHENTICATED", 429: "RESOURCE_EXHAUSTED", 400: "INVALID_ARGUMENT"},
}


def error_type(name: str, data: dict[str, Any]) -> str:
    if name == "messages":
        assert data["type"] == "error"
    return data["error"]["status" if name == "gemini" else "type"]


@every_dialect
@streamed_or_not
async def test_errors_have_the_providers_shape(tmp_path: Path, speaker: type[Speaker], stream: bool) -> None:
    types = ERROR_TYPES[speaker.name]
    async with make_rig(tmp_path, [Fault("overload"), Fault("error"), "ok"]) as rig:
        client = speaker(rig.http)
        client.user("hi")
        url, body = client.url(stream), client.body(stream)
        busy = await rig.http.post(url, json=body)
        assert (busy.status_code, error_type(client.name, busy.json())) == (429, types[429])
        assert int(busy.headers["retry-after"]) >= 1
        broken = await rig.http.post(url, json=body)
        assert broken.status_code == 503
        assert "retry-after" in broken.headers
        wrong = await rig.http.post(url, json=body, headers={"authorization": "Bearer no"})
        assert (wrong.status_code, error_type(client.name, wrong.json())) == (401, types[401])
        malformed = await rig.http.post(url, content=b'{"messages": [')
        assert (malformed.status_code, error_type(client.name, malformed.json())) == (400, types[400])
        assert (await rig.http.post(url, json=body)).status_code == 200
        assert [call.state for call in rig.graph.calls.values()] == ["failed", "failed", "done"]


OVERFLOW_WORDS = {
    "chat": "maximum context length",
    "responses": "maximum context length",
    "messages": "prompt is too long",
    "gemini": "exceeds the maximum number of tokens",
}


@every_dialect
async def test_context_overflow_is_said_in_the_providers_words(tmp_path: Path, speaker: type[Speaker]) -> None:
    async with make_rig(tmp_path, ["ok"], context_length=60) as rig:
        client = speaker(rig.http, tools=False)
        client.user("x" * 300)
        response = await rig.http.post(client.url(False), json=client.body(False))
        assert response.status_code == 400
        assert OVERFLOW_WORDS[client.name] in response.text
        assert len(rig.graph.calls) == 0


@every_dialect
async def test_a_stream_never_ends_cleanly_without_its_terminal_event(tmp_path: Path, speaker: type[Speaker]) -> None:
    fault = Fault("gone", after=6, say=Say("a reply that is cut in the middle"))
    async with make_rig(tmp_path, [fault]) as rig:
        client = speaker(rig.http)
        client.user("hi")
        received, error = await read_until_broken(rig.http, client.url(True), client.body(True))
        assert isinstance(error, httpx.RemoteProtocolError)
        assert "error" in received
        for terminal in ("[DONE]", "message_stop", "response.completed", "finishReason"):
            assert terminal not in received
        assert rig.graph.calls[0].state == "failed"


@every_dialect
async def test_streams_show_life_while_the_engine_thinks(tmp_path: Path, speaker: type[Speaker]) -> None:
    from gyre_sdk.capture.gateway import GatewayConfig

    async with make_rig(tmp_path, [Say("late", first_delay=0.4)], config=GatewayConfig(keepalive_s=0.1)) as rig:
        client = speaker(rig.http)
        client.user("hi")
        seen_before_tokens = 0
        async with rig.http.stream("POST", client.url(True), json=client.body(True)) as response:
            async for chunk in response.aiter_bytes():
                if chunk and not rig.engine.log[0].output_ids:
                    seen_before_tokens += 1
        assert seen_before_tokens >= 2


@every_dialect
async def test_models_are_listed(tmp_path: Path, speaker: type[Speaker]) -> None:
    headers = {"anthropic-version": "2023-06-01"} if speaker is Messages else {}
    path = {"gemini": "/v1beta/models", "responses": "/v1/models?client_version=1"}.get(speaker.name, "/v1/models")
    async with make_rig(tmp_path, ["ok"]) as rig:
        response = await rig.http.get(path, headers=headers)
        assert response.status_code == 200
        assert "policy" in response.text
        assert ("models" in response.json()) == (speaker.name in ("gemini", "responses"))


async def test_count_tokens_is_exact(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("Hello", odd_tokens=True), "again"]) as rig:
        client = Messages(rig.http)
        for text in ("hi", "and then?"):
            client.user(text)
            body = {key: value for key, value in client.body(False).items() if key != "max_tokens"}
            counted = (await rig.http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
            heard = await client.say()
            assert counted == heard.prompt_tokens
        assert len(rig.graph.calls) == 2


@every_dialect
@streamed_or_not
async def test_size_and_rate_limits(tmp_path: Path, speaker: type[Speaker], stream: bool) -> None:
    config = GatewayConfig(max_body_bytes=20_000, requests_per_s=0.5, request_burst=3)
    types = ERROR_TYPES[speaker.name]
    async with make_rig(tmp_path, ["ok"], config=config) as rig:
        large = speaker(rig.http)
        large.user("x" * 30_000)
        answer = await rig.http.post(large.url(stream), json=large.body(stream))
        assert answer.status_code == 413
        assert error_type(speaker.name, answer.json())
        assert "20000 bytes" in answer.text
        client = speaker(rig.http)
        await client.say("one", stream=stream)
        await client.say("two", stream=stream)
        client.user("three")
        many = await rig.http.post(client.url(stream), json=client.body(stream))
        assert (many.status_code, error_type(client.name, many.json())) == (429, types[429])
        assert 1 <= int(many.headers["retry-after"]) <= 3
        # Who guesses keys is slowed down too, and takes nothing from those who have one.
        guesses = [await rig.http.post(client.url(stream), json={}, headers=key(guess)) for guess in "abcd"]
        assert [guess.status_code for guess in guesses] == [401, 401, 401, 429]
        assert len(rig.graph.calls) == 2
        await rig.check()


def key(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", "x-api-key": token, "x-goog-api-key": token}


@every_dialect
async def test_the_error_of_a_broken_stream_says_that_asking_again_may_help(
    tmp_path: Path, speaker: type[Speaker]
) -> None:
    """By a code in the event, or as the provider's bare error: what its CLI was seen to go by."""
    fault = Fault("gone", after=6, say=Say("a reply that is cut in the middle"))
    async with make_rig(tmp_path, [fault]) as rig:
        client = speaker(rig.http)
        client.user("hi")
        received, _ = await read_until_broken(rig.http, client.url(True), client.body(True))
        last = received.strip().splitlines()[-1]
        if client.name == "chat":
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "503"
        elif client.name == "gemini":
            assert json.loads(last)["error"]["code"] == 503
        elif client.name == "messages":
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        else:
            assert json.loads(last.removeprefix("data: "))["type"] == "response.failed"
