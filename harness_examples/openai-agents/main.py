"""The OpenAI Agents SDK, unmodified: an agent with a shell and another agent as its tool, recorded as a branch graph.

pip install openai-agents==0.24.0
python harness_examples/openai-agents/main.py "Write a haiku to haiku.txt" --engine http://127.0.0.1:30000 --model models/qwen3-4b
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    Tool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

import gyre_sdk
from gyre_sdk.environments.sandbox import Sandbox, SandboxSpec, create, resolve


def make_agent(client: AsyncOpenAI, sandbox: Sandbox, api: str) -> Agent[None]:
    """The main agent. Both of the SDK's APIs work; `responses` is its own default."""
    model: Model
    if api == "responses":
        model = OpenAIResponsesModel("policy", openai_client=client)
    else:
        model = OpenAIChatCompletionsModel("policy", openai_client=client)

    async def bash(command: str) -> str:
        """Run a command in the sandbox."""
        ran = await sandbox.exec(command, cwd="/app", timeout=60)
        return f"{ran.stdout}{ran.stderr}\nexit code {ran.rc}"[-20_000:]

    shell: Tool = function_tool(bash)
    scout = Agent[None](name="scout", instructions="You look around and report.", model=model, tools=[shell])
    look = scout.as_tool(tool_name="look_around", tool_description="Have a helper find something out.")
    return Agent[None](
        name="worker", instructions="You solve tasks with bash in /app.", model=model, tools=[shell, look]
    )


async def solve(session: gyre_sdk.Session, task: str, api: str = "responses") -> str:
    """Run the agent in a fresh sandbox; its last words."""
    set_tracing_disabled(True)  # it would send traces to OpenAI
    sandbox = create(SandboxSpec(), await resolve("auto"))
    await sandbox.start()
    try:
        # All that makes it recorded: the base URL and the key.
        async with AsyncOpenAI(base_url=f"{session.base_url}/v1", api_key=session.api_key, max_retries=5) as client:
            result = await Runner.run(make_agent(client, sandbox, api), task, max_turns=100)
    finally:
        await sandbox.stop()
    return str(result.final_output)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--engine", required=True, help="URL that speaks SGLang's /generate")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--api", choices=("responses", "chat"), default="responses")
    a = parser.parse_args()
    run_dir = "runs/openai-agents"
    async with gyre_sdk.session(engine=a.engine, model=a.model, run_dir=run_dir, harness="openai-agents") as session:
        print(await solve(session, a.task, a.api))
    print(f"recorded: gyre graph {session.execution}")


if __name__ == "__main__":
    asyncio.run(main())
