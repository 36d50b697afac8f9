"""The cases in which other gateways lost tokens, sessions or rewards, each through the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from gyre_sdk.capture.gateway import Gateway, GatewayConfig
from gyre_sdk.sampling import Chunk, Completion, GenerateRequest
from gyre_sdk.testing import Fault, Say, ScriptedCall
from gyre_sdk.wire.records import Outcome
from tests.dialects.speakers import Messages, Responses
from tests.gateway.conftest import CHAT_TOOLS, Rig, make_rig

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}


def numbered(call: ScriptedCall) -> Say:
    return Say(f"reply number {call.number}", odd_tokens=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def sampled_calls(rig: Rig, leaf_call: int) -> list[int]:
    """Which calls' tokens are sampled ones on the branch that ends with a call."""
    leaf = next(leaf for leaf in rig.graph.leaves() if leaf.call == leaf_call)
    return sorted({node.call for node in leaf.nodes if node.call >= 0})


async def test_01_first_turn_sent_again_on_a_new_connection(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        first = await rig.chat([USER])
        async with httpx.AsyncClient(base_url=rig.handle.base_url, headers=rig.http.headers) as other:
            again = (await other.post("/v1/chat/completions", json={"messages": [USER]})).json()
        second = again["choices"][0]["message"]
        assert first["content"] != second["content"]
        assert (await rig.chat([USER, first, user("on")]))["content"] == "reply number 2"
        assert (await rig.chat([USER, second, user("on")]))["content"] == "reply number 3"
        await rig.check()
        assert [(link.kind, link.source, link.target) for link in rig.graph.links()] == [("retries", 0, 1)]
        assert sampled_calls(rig, 2) == [0, 2]
        assert sampled_calls(rig, 3) == [1, 3]


async def lose_reply(rig: Rig, body: dict[str, Any]) -> None:
    """Ask, and go away before the reply comes."""
    with pytest.raises(httpx.ReadTimeout):
        async with httpx.AsyncClient(base_url=rig.handle.base_url, headers=rig.http.headers, timeout=0.15) as hasty:
            await hasty.post("/v1/chat/completions", json=body)


async def test_02_reply_lost_to_a_timeout_is_given_to_the_retry(tmp_path: Path) -> None:
    replies = [Say("reply A", first_delay=0.4), Say("reply B"), Say("end")]
    async with make_rig(tmp_path, replies) as rig:
        body = {"messages": [USER]}
        await lose_reply(rig, body)
        await anyio.sleep(0.5)
        response = await rig.http.post("/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
        message = response.json()["choices"][0]["message"]
        assert message["content"] == "reply A"
        await rig.chat([USER, message, user("on")])
        await rig.check()
        assert len(rig.graph.calls) == 2
        assert rig.graph.calls[0].delivered is True


async def test_02_without_replay_the_lost_reply_is_an_orphan(tmp_path: Path) -> None:
    replies = [Say("reply A", first_delay=0.3), Say("reply B"), Say("end")]
    async with make_rig(tmp_path, replies, config=GatewayConfig(replay=False)) as rig:
        await lose_reply(rig, {"messages": [USER]})
        await anyio.sleep(0.4)
        message = await rig.chat([USER])
        assert message["content"] == "reply B"
        await rig.chat([USER, message, user("on")])
        await rig.check()
        assert [leaf.orphan for leaf in rig.graph.leaves()] == [True, False]
        assert rig.graph.orphan(0)
        assert not rig.graph.orphan(1)


async def test_02_a_call_nobody_comes_back_for_is_stopped(tmp_path: Path) -> None:
    replies = [Say("a long reply that goes on and on", delay=0.1, chunk=1), Say("B")]
    async with make_rig(tmp_path, replies, config=GatewayConfig(orphan_grace_s=0.0)) as rig:
        await lose_reply(rig, {"messages": [USER]})
        await anyio.sleep(0.3)
        assert rig.graph.calls[0].state == "failed"
        assert rig.engine.aborted == [rig.engine.log[0].rid]
        assert (await rig.chat([USER]))["content"] == "B"


async def test_02_a_retry_joins_a_call_that_still_runs(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("the only reply there is", delay=0.1, chunk=4), Say("B")]) as rig:
        await lose_reply(rig, {"messages": [USER]})
        assert (await rig.chat([USER]))["content"] == "the only reply there is"
        assert len(rig.engine.log) == 1


async def test_03_identical_body_after_delivery_is_sampled_again(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        first, second = await rig.chat([USER]), await rig.chat([USER])
        headers = {"x-stainless-retry-count": "1"}
        response = await rig.http.post("/v1/chat/completions", json={"messages": [USER]}, headers=headers)
        third = response.json()["choices"][0]["message"]
        assert len({first["content"], second["content"], third["content"]}) == 3


async def test_04_siblings_with_one_prompt_are_two_leaves(tmp_path: Path) -> None:
    def script(call: ScriptedCall) -> Say:
        return Say(f"sibling {call.number}", first_delay=0.1)

    async with make_rig(tmp_path, script) as rig:
        one, two = await asyncio.gather(rig.chat([USER]), rig.chat([USER]))
        assert one["content"] != two["content"]
        await asyncio.gather(rig.chat([USER, one, user("1")]), rig.chat([USER, two, user("2")]))
        await rig.check()
        assert len(rig.graph.leaves()) == 2
        assert rig.engine.log[0].input_ids == rig.engine.log[1].input_ids


async def test_05_interleaved_subagent_is_two_lineages(tmp_path: Path) -> None:
    task = "Find every file that mentions the parser and report back."
    calls = (("bash", json.dumps({"command": task})),)
    replies = [Say("I ask for help.", calls=calls), Say("B works"), Say("A waits"), Say("B found three files in src")]
    async with make_rig(tmp_path, replies) as rig:
        a = [{"role": "system", "content": "You are the main agent."}, user("Do it.")]
        b = [{"role": "system", "content": "You are a helper."}, user(task)]
        a_reply = await rig.chat(a, tools=CHAT_TOOLS)
        b_reply = await rig.chat(b)
        result = {"role": "tool", "tool_call_id": a_reply["tool_calls"][0]["id"], "content": "started"}
        await rig.chat([*a, a_reply, result], tools=CHAT_TOOLS)
        await rig.chat([*b, b_reply, user("more")])
        await rig.check()
        roles = {leaf.call: leaf.role for leaf in rig.graph.leaves()}
        assert roles == {2: "main", 3: "subagent"}
        assert [(k.kind, k.source, k.target, k.inferred) for k in rig.graph.links()] == [("forks", 0, 1, True)]


@pytest.mark.parametrize("nonce", ["cch=36ee5; cch=0aaa9", "cc_version=2.1.197.{}; cc_entrypoint=cli"])
async def test_06_a_nonce_in_the_system_prompt_does_not_split_the_lineage(tmp_path: Path, nonce: str) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        client = Messages(rig.http)
        for number in range(3):
            client.user(f"turn {number}")
            line = nonce.format(f"a0{number}") + f" {number}"
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: {line};"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            ]
            response = await rig.http.post("/v1/messages", json={**client.body(False), "system": system})
            client.read(response.json())
        await rig.check()
        assert len(rig.graph.leaves()) == 1
        assert rig.handle.recorder.counters.rerenders == {}
        assert "billing" not in rig.renderer.decode(rig.engine.log[-1].input_ids)


async def test_07_reasoning_dropped_by_the_harness_is_an_explicit_branch(tmp_path: Path) -> None:
    calls = (("bash", '{"command": "ls"}'),)
    replies = [Say("Look.", reasoning="secret thought", calls=calls), Say("ok")]
    async with make_rig(tmp_path, replies, family="qwen3") as rig:
        message = await rig.chat([USER], tools=CHAT_TOOLS)
        assert message.pop("reasoning_content").strip() == "secret thought"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        await rig.chat([USER, message, result], tools=CHAT_TOOLS)
        await rig.check()
        assert rig.graph.calls[1].rerender == "reasoning_dropped"
        assert rig.graph.calls[1].rerender_of == 0
        assert sampled_calls(rig, 1) == [1]
        assert rig.handle.recorder.counters.rerenders == {"reasoning_dropped": 1}


async def test_07_role_and_content_keeps_what_was_sampled(tmp_path: Path) -> None:
    calls = (("bash", '{"command": "ls"}'),)
    replies = [Say("Look.", reasoning="secret thought", calls=calls), Say("ok")]
    config = GatewayConfig(matcher="role-and-content")
    async with make_rig(tmp_path, replies, family="qwen3", config=config) as rig:
        message = await rig.chat([USER], tools=CHAT_TOOLS)
        del message["reasoning_content"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        await rig.chat([USER, message, result], tools=CHAT_TOOLS)
        await rig.check()
        assert sampled_calls(rig, 1) == [0, 1]


@pytest.mark.parametrize(("matcher", "leaves"), [("default", 1), ("strict", 2)])
async def test_08_tool_arguments_written_anew(tmp_path: Path, matcher: Any, leaves: int) -> None:
    replies = [Say("", calls=(("bash", '{"b":1,  "a":false}'),)), Say("ok")]
    async with make_rig(tmp_path, replies, config=GatewayConfig(matcher=matcher)) as rig:
        message = await rig.chat([USER], tools=CHAT_TOOLS)
        call = message["tool_calls"][0]
        assert call["function"]["arguments"] == '{"b":1,  "a":false}'
        call["function"]["arguments"] = '{"a":false,"b":1}'
        result = {"role": "tool", "tool_call_id": call["id"], "content": "x"}
        await rig.chat([USER, message, result], tools=CHAT_TOOLS)
        await rig.check()
        assert len(rig.graph.leaves()) == leaves
        if matcher == "strict":
            assert rig.graph.calls[1].rerender == "tool_args_rewritten"


async def test_08_changed_tool_arguments_are_another_history(tmp_path: Path) -> None:
    replies = [Say("", calls=(("bash", '{"a": 1}'),)), Say("ok")]
    async with make_rig(tmp_path, replies) as rig:
        message = await rig.chat([USER], tools=CHAT_TOOLS)
        message["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        await rig.chat([USER, message, result], tools=CHAT_TOOLS)
        await rig.check()
        assert rig.graph.calls[1].rerender == "tool_args_rewritten"
        # Up to the changed value the tokens are those that were sampled, behind the same prefix: they stay shared.
        assert len(rig.graph.leaves()) == 2


async def test_09_a_stream_that_lost_ids_is_not_recorded_as_a_reply(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["ok"]) as rig:

        async def lossy(request: GenerateRequest) -> AsyncIterator[Chunk | Completion]:
            ids = np.arange(10, 20, dtype=np.int32)
            yield Chunk(ids[:3], np.zeros(3, np.float32))
            yield Chunk(ids[5:], np.zeros(5, np.float32))
            yield Completion(finish="stop", output_ids=ids, logprobs=np.zeros(10, np.float32))

        rig.engine.generate = lossy  # type: ignore[method-assign]
        response = await rig.http.post("/v1/chat/completions", json={"messages": [USER]})
        assert response.status_code == 503
        assert rig.graph.calls[0].state == "failed"
        assert len(rig.graph.nodes) == 0


async def test_10_a_rejected_retry_changes_nothing(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        first = await rig.chat([USER])
        second = await rig.chat([USER, first, user("2")])
        digest = rig.graph.digest()
        response = await rig.http.post("/v1/chat/completions", json={"messages": [USER, first, user("2")], "n": 3})
        assert response.status_code == 400
        assert rig.graph.digest() == digest
        await rig.chat([USER, first, user("2"), second, user("3")])
        await rig.check()
        assert sampled_calls(rig, 2) == [0, 1, 2]


async def test_11_a_reply_whose_beginning_was_cut_off_is_given_text(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("one two"), Say("five")]) as rig:
        await rig.chat([USER])
        await rig.chat([USER, {"role": "assistant", "content": "two"}, user("4")])
        await rig.check()
        assert rig.graph.calls[1].rerender == "message_edited"
        assert sampled_calls(rig, 1) == [1]


async def test_12_a_truncated_reply_is_not_extended(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("cut of", stop=False, odd_tokens=True), Say("ok")]) as rig:
        cut = await rig.chat([USER])
        await rig.chat([USER, cut, user("another way")])
        await rig.check()
        assert rig.graph.calls[1].rerender == "truncated_output"
        assert rig.graph.calls[1].rerender_of == 0
        prompt = rig.renderer.decode(rig.engine.log[1].input_ids)
        assert "cut of<|im_end|>\n<|im_start|>user\nanother way" in prompt
        assert len(rig.graph.leaves()) == 2


async def test_13_a_restarted_gateway_goes_on(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        messages: list[dict[str, Any]] = [USER]
        for number in range(3):
            messages += [await rig.chat(messages), user(f"turn {number}")]
        port = int(rig.handle.base_url.rpartition(":")[2])
        await rig.gateway.aclose()
        again = Gateway(rig.engine, rig.renderer, tmp_path / "run")
        async with again.serving(port=0) as url:
            assert url.rpartition(":")[2] != str(port)
            handles = await again.recover()
            assert [handle.execution for handle in handles] == [rig.handle.execution]
            async with httpx.AsyncClient(base_url=url, headers=rig.http.headers) as http:
                response = await http.post("/v1/chat/completions", json={"messages": messages})
            assert response.status_code == 200
            graph = handles[0].graph
            assert graph.calls[3].rerender == ""
            assert len(graph.leaves()) == 1
            assert graph.path_tokens(3).tolist() == rig.engine.log[3].input_ids + rig.engine.log[3].output_ids
            await again.seal(rig.handle.execution, Outcome(status="completed"))


async def test_14_an_infrastructure_failure_is_not_a_zero(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["ok"]) as rig:
        await rig.chat([USER])
        outcome = Outcome(status="completed", failure="verifier", message="no reward file")
        await rig.gateway.seal(rig.handle.execution, outcome)
        await rig.check()
        assert rig.graph.outcome is not None
        assert rig.graph.outcome.reward is None
        assert not rig.graph.outcome.valid


CODEX_TOOLS = [
    {"type": "function", "name": "exec_command", "description": "d", "strict": False, "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "syntax": "lark"}},
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "tools": [{"type": "function", "name": "spawn_agent", "description": "d", "parameters": {"type": "object"}}],
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
]


async def test_15_a_codex_turn(tmp_path: Path) -> None:
    calls = (
        ("exec_command", '{"cmd": "ls"}'),
        ("apply_patch", '{"input": "*** Begin Patch"}'),
        ("spawn_agent", '{"message": "help"}'),
    )
    replies = [Say("On it.", reasoning="think", calls=calls), Say("done", reasoning="more"), Say("again")]
    from gyre_sdk.capture.dialects.responses import read_tools

    tools = read_tools(json.dumps(CODEX_TOOLS).encode())
    async with make_rig(tmp_path, replies, family="qwen3", tools=tools) as rig:
        history: list[dict[str, Any]] = [
            {"type": "message", "id": "i0", "role": "developer", "content": [{"type": "input_text", "text": "base"}]},
            {"type": "message", "id": "i1", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        ]
        body = {
            "model": "m",
            "input": history,
            "tools": CODEX_TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "client_metadata": {"a": "1", "b": "2"},
        }
        # The client hangs up at response.completed, before anything else.
        items: list[dict[str, Any]] = []
        async with rig.http.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and '"response.completed"' in line:
                    items = json.loads(line[6:])["response"]["output"]
                    break
        assert [item["type"] for item in items] == [
            "reasoning",
            "message",
            "function_call",
            "custom_tool_call",
            "function_call",
        ]
        assert items[3]["input"] == "*** Begin Patch"
        assert items[4]["namespace"] == "multi_agent_v1"
        outputs = [
            {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "a.txt"},
            {"type": "custom_tool_call_output", "call_id": items[3]["call_id"], "output": "patched"},
            {"type": "function_call_output", "call_id": items[4]["call_id"], "output": "agent-1"},
        ]
        client = Responses(rig.http)
        client.history = [*history, *items, *outputs]
        next_body = {**body, "input": client.history, "client_metadata": {"b": "2", "a": "1"}}
        response = await rig.http.post("/v1/responses", json={**next_body, "stream": False})
        assert response.status_code == 200, response.text
        await rig.check()
        assert rig.graph.calls[0].delivered is True
        assert rig.graph.calls[1].rerender == ""
        # After compaction: a summary message, no tools.
        compacted = [
            history[0],
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "sum"}]},
        ]
        response = await rig.http.post("/v1/responses", json={**body, "input": compacted, "tools": [], "stream": False})
        assert response.status_code == 200
        assert response.json()["output"][-1]["type"] == "message"


async def test_reasoning_of_a_cut_stream_is_left_out(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("fine", reasoning="ok")], family="qwen3") as rig:
        client = Responses(rig.http)
        client.user("go")
        cut = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "half a thought"}]}
        client.history += [cut, dict(cut)]
        await client.say()
        assert "half a thought" not in rig.renderer.decode(rig.engine.log[0].input_ids)


async def test_a_call_that_failed_leaves_no_prompt_tail_behind(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["one", Fault("error"), "two"]) as rig:
        first = await rig.chat([USER])
        nodes = set(rig.graph.nodes)
        body = {"messages": [USER, first, user("2")]}
        assert (await rig.http.post("/v1/chat/completions", json=body)).status_code == 503
        assert set(rig.graph.nodes) == nodes
        assert (await rig.chat([USER, first, user("2")]))["content"] == "two"
        await rig.check()


async def test_tools_that_change_in_mid_session_are_a_branch_with_a_reason(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        first = await rig.chat([USER], tools=CHAT_TOOLS)
        await rig.chat([USER, first, user("2")])
        await rig.check()
        assert rig.graph.calls[1].rerender == "tools_changed"
        assert rig.graph.role_of_call(1) == "main"


async def test_a_system_prompt_that_changes_every_call(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        messages: list[dict[str, Any]] = [USER]
        for number in range(4):
            reply = await rig.chat([{"role": "system", "content": f"It is {number} o'clock."}, *messages])
            messages += [reply, user(f"turn {number}")]
        await rig.check()
        assert [call.rerender for call in rig.graph.calls.values()] == ["", *["system_changed"] * 3]
        assert {leaf.role for leaf in rig.graph.leaves()} == {"main"}


async def test_a_message_edited_in_the_past(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:
        first = await rig.chat([USER])
        second = await rig.chat([USER, first, user("2")])
        edited = [user("hello"), first, user("2"), second, user("3")]
        await rig.chat(edited)
        await rig.check()
        assert sampled_calls(rig, 2) == [2]


async def test_two_clients_share_one_execution(tmp_path: Path) -> None:
    async with make_rig(tmp_path, numbered) as rig:

        async def talk(name: str) -> None:
            messages: list[dict[str, Any]] = [user(f"I am {name}")]
            for number in range(6):
                messages += [await rig.chat(messages), user(f"{name} {number}")]

        await asyncio.gather(talk("one"), talk("two"), talk("three"))
        await rig.check()
        assert len(rig.graph.leaves()) == 3
        assert rig.handle.recorder.counters.rerenders == {}


async def test_a_client_that_leaves_in_mid_stream(tmp_path: Path) -> None:
    replies = [Say("a reply that goes on for a while", chunk=1, delay=0.03), Say("again")]
    async with make_rig(tmp_path, replies) as rig:
        body = {"messages": [USER], "stream": True}
        async with rig.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break
        await anyio.sleep(0.1)
        message = await rig.chat([USER])
        assert message["content"] == "a reply that goes on for a while"
        assert len(rig.engine.log) == 1
        await rig.check()


async def test_sealing_cancels_late_calls(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Say("never heard", first_delay=5)]) as rig:
        task = asyncio.create_task(rig.http.post("/v1/chat/completions", json={"messages": [USER]}))
        while not rig.engine.log:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await rig.gateway.seal(rig.handle.execution, Outcome(status="timeout", reward=0.0, valid=True))
        assert (await task).status_code == 410
        assert rig.graph.calls[0].state == "failed"
        assert rig.engine.aborted
        await rig.check()


async def test_limits_end_an_execution_cleanly(tmp_path: Path) -> None:
    from gyre_sdk.capture.config import Limits

    async with make_rig(tmp_path, numbered, config=GatewayConfig(limits=Limits(turns=2))) as rig:
        messages: list[dict[str, Any]] = [USER]
        for _ in range(2):
            messages += [await rig.chat(messages), user("on")]
        response = await rig.http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "limit_reached"
        assert rig.handle.recorder.limit_reached == "turns"
        assert len(rig.graph.calls) == 2
