"""Traffic of known harnesses in their own form: marks, subagents, compaction, auxiliary calls, retries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre_sdk.testing import Fault, Say, ScriptedCall
from tests.dialects.speakers import Gemini, Messages, Responses
from tests.gateway.conftest import Rig, make_rig

pytestmark = pytest.mark.anyio

TASK = "Search the repository for every use of the old parser and list the files."
SUMMARY = "The user wants the parser replaced. So far src/a.py and src/b.py were changed; tests/c.py is left to do."
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{nonce}; cc_entrypoint=sdk-cli;{more}"


def links(rig: Rig) -> set[tuple[str, int, int]]:
    return {(link.kind, link.source, link.target) for link in rig.graph.links()}


def roles(rig: Rig) -> list[str]:
    return [rig.graph.role_of_call(call) for call in sorted(rig.graph.calls)]


class ClaudeCode(Messages):
    """System blocks, headers and models as Claude Code sends them."""

    agent = ""
    system = "You are Claude Code."

    async def ask(self, text: str | None = None, **fields: Any) -> Any:
        if text is not None:
            self.user(text)
        more = " cc_is_subagent=true;" if self.agent else ""
        nonce = "a1f" if not self.agent else "77c"
        system = [
            {"type": "text", "text": BILLING.format(nonce=nonce, more=more)},
            {"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}},
        ]
        headers = {"x-claude-code-session-id": "s1", **({"x-claude-code-agent-id": self.agent} if self.agent else {})}
        body = {**self.body(False), "system": system, **fields}
        response = await self.http.post(self.path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return self.read(response.json())


async def test_claude_code_title_subagent_and_compaction(tmp_path: Path) -> None:
    def script(call: ScriptedCall) -> Say:
        if "title" in call.prompt[-120:]:
            return Say('{"title": "Replace the parser"}')
        if "detailed summary of the conversation" in call.prompt[-600:]:
            return Say(SUMMARY)
        if "You search." in call.prompt:
            return Say("Found src/a.py and src/b.py and also tests/c.py.")
        if call.prompt.count("<|im_start|>assistant") == 1 and "short" not in call.prompt:
            return Say("I ask a helper.", calls=(("bash", json.dumps({"command": TASK})),))
        return Say("Working on it now.")

    async with make_rig(tmp_path, script) as rig:
        title = ClaudeCode(rig.http, tools=False)
        title.system = "Write a title."
        schema = {"format": {"type": "json_schema", "schema": {}}}
        await title.ask("title for: replace the parser", output_config=schema, thinking={"type": "disabled"})
        main = ClaudeCode(rig.http)
        first = await main.ask("Replace the parser.")
        helper = ClaudeCode(rig.http)
        helper.agent, helper.system = "agent-7", "You search."
        found = await helper.ask(TASK)
        main.results(first, [found.text])
        await main.ask()
        instruction = "Your task is to create a detailed summary of the conversation so far. " + "Be thorough. " * 40
        await main.ask(instruction)
        main.history = [
            {"role": "user", "content": [{"type": "text", "text": f"This session continues. {SUMMARY}"}]},
        ]
        await main.ask()
        await rig.check()
        assert roles(rig) == ["auxiliary", "main", "subagent", "main", "main-summary", "main"]
        assert links(rig) == {("forks", 1, 2), ("returns", 2, 3), ("compacts", 4, 5)}


class Codex(Responses):
    """Headers and metadata as Codex sends them."""

    thread, parent, window = "t1", "", 0
    kind = ""

    async def ask(self, text: str | None = None, **fields: Any) -> Any:
        if text is not None:
            self.user(text)
        headers = {
            "session-id": "s1",
            "thread-id": self.thread,
            "x-client-request-id": self.thread,
            "x-codex-window-id": f"{self.thread}:{self.window}",
        }
        metadata: dict[str, Any] = {"root_turn_id": "r"}
        if self.parent:
            headers |= {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": self.parent}
            metadata |= {"parent_thread_id": self.parent, "subagent_kind": "thread_spawn"}
        if self.kind:
            metadata["request_kind"] = self.kind
        headers["x-codex-turn-metadata"] = json.dumps(metadata)
        response = await self.http.post(self.path, json={**self.body(False), **fields}, headers=headers)
        assert response.status_code == 200, response.text
        return self.read(response.json())


async def test_codex_asynchronous_subagent_and_compaction(tmp_path: Path) -> None:
    def script(call: ScriptedCall) -> Say:
        if "HANDOFF" in call.prompt[-300:]:
            return Say(SUMMARY)
        if call.number == 0:
            return Say("Spawning.", calls=(("bash", json.dumps({"command": TASK})),))
        return Say(f"step {call.number} of the work is done here")

    async with make_rig(tmp_path, script) as rig:
        main = Codex(rig.http)
        first = await main.ask("Replace the parser.")
        helper = Codex(rig.http)
        helper.thread, helper.parent = "t2", "t1"
        await helper.ask(TASK)
        main.results(first, ["agent started"])
        await main.ask()
        done = await helper.ask("more")
        await main.ask(f"The agent says: {done.text}")
        main.kind = "compaction"
        await main.ask("CONTEXT CHECKPOINT COMPACTION. Write a HANDOFF summary.", tools=[], parallel_tool_calls=False)
        main.kind, main.window = "", 1
        main.history = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Replace the parser."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"Summary: {SUMMARY}"}]},
        ]
        await main.ask()
        await rig.check()
        assert roles(rig) == ["main", "subagent", "main", "subagent", "main", "main-summary", "main"]
        found = links(rig)
        assert {("forks", 0, 1), ("returns", 3, 4), ("compacts", 5, 6)} <= found


async def test_codex_retries_with_its_metadata_in_another_order(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [Fault("error"), "ok"]) as rig:
        client = Codex(rig.http)
        client.user("go")
        body = client.body(False)
        first = await rig.http.post("/v1/responses", json={**body, "client_metadata": {"a": "1", "b": "2"}})
        assert first.status_code == 503
        again = await rig.http.post("/v1/responses", json={**body, "client_metadata": {"b": "2", "a": "1"}})
        assert again.status_code == 200
        assert [call.state for call in rig.graph.calls.values()] == ["failed", "done"]
        assert links(rig) == set()


async def test_gemini_subagent_without_any_mark_is_inferred(tmp_path: Path) -> None:
    def script(call: ScriptedCall) -> Say:
        if call.number == 0:
            return Say("I delegate.", calls=(("bash", json.dumps({"command": TASK})),))
        return Say("The files are src/a.py and src/b.py, nothing else uses it.")

    async with make_rig(tmp_path, script) as rig:
        main = Gemini(rig.http)
        first = await main.say("Replace the parser.")
        helper = Gemini(rig.http)
        found = await helper.say(f"Your task: {TASK}")
        main.results(first, [found.text])
        await main.say()
        await rig.check()
        assert roles(rig) == ["main", "subagent", "main"]
        assert links(rig) == {("forks", 0, 1), ("returns", 1, 2)}
        assert all(link.inferred for link in rig.graph.links())


async def test_a_user_message_sent_as_a_block_comes_back_as_a_string(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["one", "two"]) as rig:
        client = Messages(rig.http)
        await client.say("hello")
        client.history[0]["content"] = "hello"
        await client.say("again")
        await rig.check()
        assert rig.graph.calls[1].rerender == ""


async def test_system_messages_inside_the_conversation(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["one", "two"]) as rig:
        client = Messages(rig.http)
        client.user("hello")
        client.history.append({"role": "system", "content": [{"type": "text", "text": "a reminder"}]})
        response = await rig.http.post("/v1/messages", json=client.body(False))
        assert response.status_code == 200
        client.history.append({"role": "assistant", "content": response.json()["content"]})
        client.user("on")
        assert (await rig.http.post("/v1/messages", json=client.body(False))).status_code == 200
        await rig.check()
        assert rig.graph.calls[1].rerender == ""


async def test_a_stream_asked_again_without_streaming_is_the_same_request(tmp_path: Path) -> None:
    """Claude Code asks for its title again, not streamed, when the stream was cut."""
    import anyio

    async with make_rig(tmp_path, [Say("a title for this", chunk=1, delay=0.03), Say("other")]) as rig:
        client = Messages(rig.http)
        client.user("title?")
        async with rig.http.stream("POST", "/v1/messages", json=client.body(True)) as response:
            async for _ in response.aiter_bytes():
                break
        await anyio.sleep(0.1)
        heard = await client.say()
        assert heard.text == "a title for this"


async def test_hidden_probe_requests(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["ok"]) as rig:
        assert (await rig.http.head("/")).status_code == 200
        assert (await rig.http.get("/healthz")).json()["status"] == "ok"
        assert (await rig.http.get("/nowhere")).status_code == 404


async def test_a_reminder_behind_the_summary_instruction(tmp_path: Path) -> None:
    """Claude Code puts a system message behind what it asks; it is still what it asks."""

    def script(call: ScriptedCall) -> Say:
        return Say(SUMMARY) if "detailed summary" in call.prompt[-900:] else Say("Working.")

    async with make_rig(tmp_path, script) as rig:
        main = ClaudeCode(rig.http)
        await main.ask("Replace the parser.")
        main.user("Your task is to create a detailed summary of the conversation so far.")
        main.history.append({"role": "system", "content": [{"type": "text", "text": "You may use agents. " * 20}]})
        await main.ask()
        main.history = [{"role": "user", "content": f"This session continues. {SUMMARY}"}]
        await main.ask()
        assert roles(rig) == ["main", "main-summary", "main"]
        assert links(rig) == {("compacts", 1, 2)}


async def test_a_task_behind_the_surroundings_and_an_answer_in_a_tool_call(tmp_path: Path) -> None:
    """Qwen Code and Codex tell a subagent where it is before its task; Gemini CLI's end with a call that holds the answer."""
    answer = "The files are src/a.py and src/b.py, nothing else uses it."

    def script(call: ScriptedCall) -> Say:
        if call.number == 0:
            return Say("I delegate.", calls=(("bash", json.dumps({"command": TASK})),))
        if call.number == 1:
            return Say("", calls=(("bash", json.dumps({"command": "ls", "a": {"response": answer}})),))
        return Say("Done then.")

    async with make_rig(tmp_path, script) as rig:
        main = Gemini(rig.http)
        first = await main.say("Replace the parser.")
        helper = Gemini(rig.http)
        helper.user("This is the folder: /app, with 3 files. The date is Sunday.")
        await helper.say(TASK)
        main.results(first, [f"Subagent finished. Result: {answer}"])
        await main.say()
        assert roles(rig) == ["main", "subagent", "main"]
        assert links(rig) == {("forks", 0, 1), ("returns", 1, 2)}
        assert [link.reason for link in rig.graph.links() if link.kind == "forks"] == [
            "the prompt of a tool call reappears"
        ]


async def test_the_same_messages_in_another_window_are_no_retry(tmp_path: Path) -> None:
    """Two compactions of Codex may leave the same words."""
    async with make_rig(tmp_path, ["one of the replies", "another of the replies"]) as rig:
        client = Codex(rig.http)
        await client.ask("Replace the parser.")
        client.history, client.window = client.history[:1], 1
        await client.ask()
        assert "retries" not in {kind for kind, _, _ in links(rig)}
        assert roles(rig) == ["main", "main"]
