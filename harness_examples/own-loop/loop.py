"""A coding agent of our own in little more than a hundred lines: bash, subagents, retries and compaction, recorded as a branch graph.

    python harness_examples/own-loop/loop.py "Write a haiku to haiku.txt" --engine http://127.0.0.1:30000 --model models/qwen3-4b

The commands run in a sandbox without network; the model is whatever speaks SGLang's /generate at --engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

import gyre_sdk
from gyre_sdk.environments.sandbox import Sandbox, SandboxSpec, create, resolve

SYSTEM = "You solve tasks with bash in /app. Say what you did when you are done."
SUMMARISE = "Summarise the work so far for yourself: the task, what is done, what is left."
LONGEST = 24  # messages; then the conversation is compacted
Message = dict[str, Any]


def tool(name: str, description: str, argument: str) -> Message:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


BASH = tool("bash", "Run a command in the sandbox.", "command")
DELEGATE = tool("delegate", "Have a helper with a fresh context do a self-contained piece of work.", "task")


def readable(call: Message) -> bool:
    """Whether a tool call's arguments are an object with one string in it."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    return isinstance(arguments, dict) and [type(value) for value in arguments.values()] == [str]


class Agent:
    """One agent; a subagent is another one inside a `fork` scope."""

    def __init__(self, session: gyre_sdk.Session, http: httpx.AsyncClient, sandbox: Sandbox, helper: bool = False):
        self.session, self.http, self.sandbox = session, http, sandbox
        self.tools = [BASH] if helper else [BASH, DELEGATE]
        self.messages: list[Message] = []

    async def ask(self, tools: list[Message]) -> Message:
        """One reply. A garbled tool call is sampled again, in a `retry` scope: the graph says which reply it replaces."""
        message = await self.post(tools)
        if not all(readable(call) for call in message.get("tool_calls") or []):
            with self.session.retry():
                message = await self.post(tools)
        return message

    async def post(self, tools: list[Message]) -> Message:
        """One request, sent again while the engine is away: the gateway knows by itself that it is the same one."""
        body = {"model": "policy", "messages": self.messages, "tools": tools}
        for attempt in range(6):
            answer = await self.http.post("/v1/chat/completions", json=body)
            if answer.status_code not in (429, 500, 503):
                break
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)) * 2**attempt)
        answer.raise_for_status()
        message: Message = answer.json()["choices"][0]["message"]
        return message

    async def run(self, task: str, max_turns: int = 100) -> str:
        """Work until the model calls no more tools; its last words."""
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        for _ in range(max_turns):
            if len(self.messages) > LONGEST:
                await self.compact(task)
            message = await self.ask(self.tools)
            self.messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                return message["content"] or ""
            results = await asyncio.gather(*(self.call(call) for call in calls))  # all at once
            for call, result in zip(calls, results, strict=True):
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return "out of turns"

    async def call(self, call: Message) -> str:
        """The result of a tool call; what is wrong with it, the model is told."""
        if not readable(call):
            return "bad arguments: expected an object with one string"
        (argument,) = json.loads(call["function"]["arguments"]).values()
        if call["function"]["name"] == "delegate":
            with self.session.fork():
                return await Agent(self.session, self.http, self.sandbox, helper=True).run(argument)
        ran = await self.sandbox.exec(argument, cwd="/app", timeout=60)
        return f"{ran.stdout}{ran.stderr}\nexit code {ran.rc}"[-20_000:]

    async def compact(self, task: str) -> None:
        """Go on from a summary, which is written with the whole conversation in view."""
        self.messages.append({"role": "user", "content": SUMMARISE})
        with self.session.compact():
            summary = (await self.ask(self.tools))["content"]
        told = f"{task}\n\nThis is what was done before:\n{summary}"
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": told}]


async def solve(session: gyre_sdk.Session, task: str, check: str = "") -> str:
    """Run the agent in a fresh sandbox; with `check`, a command that must succeed, the reward is 1 or 0."""
    sandbox = create(SandboxSpec(), await resolve("auto"))
    await sandbox.start()
    try:
        async with session.http() as http:
            said = await Agent(session, http, sandbox).run(task)
        if check:
            graded = await sandbox.exec(check, cwd="/app", timeout=60)
            session.finish(reward=float(graded.rc == 0))
    finally:
        await sandbox.stop()
    return said


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--engine", required=True, help="URL that speaks SGLang's /generate")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--check", default="", help="command that exits with 0 when the task is solved")
    a = parser.parse_args()
    async with gyre_sdk.session(engine=a.engine, model=a.model, run_dir="runs/own-loop", harness="own-loop") as session:
        print(await solve(session, a.task, a.check))
    print(f"recorded: gyre graph {session.execution}")


if __name__ == "__main__":
    asyncio.run(main())
