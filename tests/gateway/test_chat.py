"""Chat completions through the wire: exact tokens, streaming, tool calls, errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx
import pytest

from gyre_sdk.capture.gateway import ExecutionSpec
from gyre_sdk.capture.model import Part
from gyre_sdk.testing import Fault, Say
from gyre_sdk.wire.records import Outcome
from tests.gateway.conftest import CHAT_TOOLS, make_rig, read_until_broken

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}


async def stream_chat(http: httpx.AsyncClient, messages: list[dict], **fields: object) -> list[dict]:
    """All chunks of a streamed reply; asserts that it ends with [DONE]."""
    body = {"model": "m", "messages": messages, "stream": True, **fields}
    chunks: list[dict] = []
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    return chunks


async def test_turns_extend_the_sampled_tokens_exactly(tmp_path: Path) -> None:
    replies = [Say("Hello there! caf\u00e9 \U0001f600", odd_tokens=True), Say("more", odd_tokens=True), "end"]
    async with make_rig(tmp_path, replies) as rig:
        messages = [{"role": "system", "content": "S"}, USER]
        for _ in range(3):
            messages = [*messages, await rig.chat(messages), {"role": "user", "content": "go on"}]
        await rig.check()
        assert [call.rerender for call in rig.graph.calls.values()] == ["", "", ""]
        assert len(rig.graph.leaves()) == 1
        log = rig.engine.log
        for earlier, later in itertools.pairwise(log):
            context = earlier.input_ids + earlier.output_ids
            assert later.input_ids[: len(context)] == context


async def test_streaming_and_not_are_one_reply(tmp_path: Path) -> None:
    text = "  odd  spaces\n\nand \u00e9\u00e8 \U0001f600 across tokens"
    async with make_rig(tmp_path, [Say(text, chunk=1, odd_tokens=True)]) as rig:
        whole = await rig.chat([USER])
        chunks = await stream_chat(rig.http, [USER], stream_options={"include_usage": True})
        streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        assert whole["content"] == streamed == text
        assert chunks[-1]["usage"]["completion_tokens"] == len(rig.engine.log[1].output_ids)
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
        await rig.check()


async def test_first_byte_leaves_with_the_first_token(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("one two three four five six", chunk=2, delay=0.05)]) as rig:
        body = {"model": "m", "messages": [USER], "stream": True}
        seen = -1
        async with rig.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and seen < 0:
                    seen = len(rig.engine.log[0].output_ids)
        assert 0 < seen < len(rig.engine.log[0].output_ids)


async def test_parallel_tool_calls_and_results_in_one_lineage(tmp_path: Path) -> None:
    calls = (("bash", '{"b":1,  "a":false}'), ("bash", '{"command": "pwd"}'))
    async with make_rig(tmp_path, [Say("I look.", calls=calls), "done"]) as rig:
        chunks = await stream_chat(rig.http, [USER], tools=CHAT_TOOLS)
        deltas = [d for c in chunks if c["choices"] for d in c["choices"][0]["delta"].get("tool_calls", ())]
        arguments = ["".join(d["function"].get("arguments", "") for d in deltas if d["index"] == i) for i in (0, 1)]
        assert arguments == [calls[0][1], calls[1][1]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        ids = [d["id"] for d in deltas if "id" in d]
        # The harness sends the arguments back with sorted keys and other spacing.
        back = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": "bash", "arguments": json.dumps(json.loads(text), sort_keys=True)},
            }
            for id_, text in zip(ids, arguments)
        ]
        results = [{"role": "tool", "tool_call_id": id_, "content": f"result {n}"} for n, id_ in enumerate(ids)]
        await rig.chat(
            [USER, {"role": "assistant", "content": "I look.", "tool_calls": back}, *results], tools=CHAT_TOOLS
        )
        await rig.check()
        assert rig.graph.calls[1].rerender == ""
        assert len(rig.graph.leaves()) == 1


async def test_usage_is_honest(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["hello"]) as rig:
        response = await rig.http.post("/chat/completions", json={"model": "m", "messages": [USER]})
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == len(rig.engine.log[0].input_ids)
        assert usage["completion_tokens"] == len(rig.engine.log[0].output_ids)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages": "x"}', 400),
        (b'{"messages": []}', 400),
        (b'{"messages": [{"role": "alien", "content": "x"}]}', 400),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["a"]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "unknown_field": {"deep": [1]}}', 200),
        (b"\xff\xfe", 400),
    ],
)
async def test_bad_requests_leave_no_trace(tmp_path: Path, body: bytes, status: int) -> None:
    async with make_rig(tmp_path, ["ok"]) as rig:
        response = await rig.http.post("/v1/chat/completions", content=body)
        assert response.status_code == status, response.text
        if status != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert len(rig.graph.calls) == 0


async def test_tokens_and_seals(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["ok"]) as rig:
        body = {"model": "m", "messages": [USER]}
        wrong = await rig.http.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == 401
        async with httpx.AsyncClient(base_url=rig.handle.base_url) as anonymous:
            none = await anonymous.post("/v1/chat/completions", json=body)
        assert none.status_code == 401
        outcome = Outcome(status="completed", reward=0.0, valid=True)
        await rig.gateway.seal(rig.handle.execution, outcome)
        await rig.gateway.seal(rig.handle.execution, outcome)
        late = await rig.http.post("/v1/chat/completions", json=body)
        assert late.status_code == 410
        assert rig.graph.outcome == outcome
        other = await rig.gateway.open(ExecutionSpec())
        assert other.execution != rig.handle.execution


async def test_context_overflow_as_clients_know_it(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["ok"], context_length=40) as rig:
        long = {"role": "user", "content": "x" * 200}
        response = await rig.http.post("/v1/chat/completions", json={"model": "m", "messages": [long]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert len(rig.graph.calls) == 0


async def test_an_overloaded_engine_is_429_with_retry_after(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Fault("overload"), "ok"]) as rig:
        response = await rig.http.post("/v1/chat/completions", json={"model": "m", "messages": [USER]})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert (await rig.chat([USER]))["content"] == "ok"
        assert [call.state for call in rig.graph.calls.values()] == ["failed", "done"]
        await rig.check()


async def test_an_engine_lost_in_mid_reply_is_continued_from_its_partial_tokens(tmp_path: Path) -> None:
    first = Say("one two three four five six seven")

    def script(call):  # type: ignore[no-untyped-def]
        if call.number == 0:
            return Fault("gone", after=8, say=first)
        done = len(call.input_ids) - prompt_length[0]
        assert done == 8
        return Say(raw=None, text=rig.renderer.decode(rig.engine.ids_of(first)[8:-1]))

    prompt_length = [0]
    async with make_rig(tmp_path, script) as rig:
        prompt_length[0] = len(rig.renderer.render([Part("user", "hi")], []))
        chunks = await stream_chat(rig.http, [USER])
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        assert text == first.text
        call = rig.graph.calls[0]
        assert call.output_ids.tolist() == rig.engine.ids_of(first)
        assert sum(span.end - span.start for span in call.versions) == len(call.output_ids)


async def test_a_stream_that_cannot_be_finished_ends_with_an_error_and_a_reset(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Fault("gone", after=4)]) as rig:
        body = {"model": "m", "messages": [USER], "stream": True}
        received, error = await read_until_broken(rig.http, "/v1/chat/completions", body)
        assert isinstance(error, httpx.RemoteProtocolError)
        assert "[DONE]" not in received
        assert '"error"' in received
        assert rig.graph.calls[0].state == "failed"
