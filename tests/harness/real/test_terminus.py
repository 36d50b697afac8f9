"""Harbor's Terminus-2, unmodified, when things go wrong and when its context is full. The plain task is in tests/environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.gateway import ExecutionHandle, Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Fault, Say, ScriptedCall, ScriptedEngine, tiny_model_dir
from gyre_sdk.wire.records import Outcome
from tests.environments.test_harbor_bridge import EDIT, _trial, harbor_python  # noqa: F401
from tests.harness.real.rig import ADDED, SPECIAL

pytestmark = [pytest.mark.harbor, pytest.mark.anyio, pytest.mark.timeout(600)]
INFO = {"max_input_tokens": 40_000, "max_output_tokens": 4_000, "input_cost_per_token": 0, "output_cost_per_token": 0}
SUMMARY = "So far settings.ini was looked at and mended; the terminal shows the prompt; all that is left is to say so."


def terminal(*commands: str, done: bool = False, **how: Any) -> Say:
    """A reply in Terminus-2's own form."""
    keys = [{"keystrokes": f"{command}\n", "duration": 0.5} for command in commands]
    said = {"analysis": "so", "plan": "on", "commands": keys, "task_complete": done}
    return Say(json.dumps(said), chunk=16, **how)


async def trial(python: str, folder: Path, script: Any, **engine: Any) -> tuple[dict[str, Any], BranchGraph]:
    # Each of its turns is a new question, at which Qwen3's own template drops reasoning; here it is kept.
    model = tiny_model_dir(folder / "model", template=None, special=SPECIAL, added=ADDED)
    renderer = load_renderer(model, "qwen3", thinking_retention="all")
    gateway = Gateway(
        ScriptedEngine(renderer, script, **engine), renderer, folder / "run", GatewayConfig(resume_attempts=2)
    )
    async with gateway.serving() as url:
        handle: ExecutionHandle = await gateway.open(ExecutionSpec(task="edit-file", harness="terminus-2"))
        more = ["--model", "openai/policy", "--base-url", url, "--token", handle.token]
        more += ["--set", "record_terminal_session=false", "--set", f"model_info={json.dumps(INFO)}"]
        found = await anyio.to_thread.run_sync(_trial, python, "auto", "terminus-2", folder, *more)
        await gateway.seal(handle.execution, Outcome(status="completed"))
    return found, handle.graph


async def test_through_faults(harbor_python: str, tmp_path: Path) -> None:  # noqa: F811
    moves = [
        Fault("overload"),
        terminal("cat settings.ini"),
        Fault("error"),
        Fault("gone", after=9, say=terminal(EDIT)),
        terminal(EDIT, skip=9),
        terminal(done=True),
        terminal(done=True),
    ]
    found, graph = await trial(harbor_python, tmp_path, lambda call: moves[min(call.number, len(moves) - 1)])
    assert found["rewards"] == {"reward": 1.0}, found
    assert [call.state for _, call in sorted(graph.calls.items())] == [
        "failed",
        "done",
        "failed",
        "done",
        "done",
        "done",
    ]
    assert {graph.role_of_call(number) for number in graph.calls} == {"main"}
    assert not list(graph.links())


async def test_a_full_context_is_summarised(harbor_python: str, tmp_path: Path) -> None:  # noqa: F811
    """Three calls of its own: a summary, questions about it from a fresh context, answers. Then it goes on from them."""
    begun: list[str] = []

    def script(call: ScriptedCall) -> Say:
        asked = call.prompt.rsplit("<|im_start|>user", 1)[-1]
        if "hand off your work" in asked:
            return Say(SUMMARY, chunk=16)
        if "picking up work" in asked:
            return Say("Which file is it, and is the port right?", chunk=16)
        if "few questions" in asked:
            return Say("It is settings.ini in /app, and the port is 8080 as the task wants it.", chunk=16)
        begun.append(asked)
        if len(begun) == 1:
            return terminal(EDIT, "head -c 30000 /dev/zero | tr '\\0' 'x'")
        if len(begun) < 5:
            return terminal("head -c 30000 /dev/zero | tr '\\0' 'y'")
        return terminal(done=True)

    found, graph = await trial(harbor_python, tmp_path, script, context_length=14_000)
    assert found["rewards"] == {"reward": 1.0}, found
    roles = [graph.role_of_call(number) for number in sorted(graph.calls)]
    assert "main-summary" in roles, roles
    assert set(roles) == {"main", "main-summary"}, roles
    compacts = [link for link in graph.links() if link.kind == "compacts"]
    assert compacts, roles
    assert any(graph.role_of_call(link.target) == "main" for link in compacts), roles
