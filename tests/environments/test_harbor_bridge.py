"""Harbor both ways, with the real Harbor: its trials in our sandboxes, and its Terminus-2 against our gateway, recorded.

Needs a Python 3.12 or newer with the extra `harbor`, named by $GYRE_HARBOR_PYTHON (`make test-harbor` makes one).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.capture.wal import read_records
from gyre_sdk.environments.harbor_bridge.trial import agent_env
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine, tiny_model_dir
from gyre_sdk.wire.records import Outcome

from .helpers import HARBOR

ROOT = Path(__file__).parents[2]
EDIT = "sed -i 's/sever/server/; s/= 80$/= 8080/' /app/settings.ini"


@pytest.fixture(scope="session")
def harbor_python() -> str:
    named = os.environ.get("GYRE_HARBOR_PYTHON")
    if not named:
        pytest.skip("set GYRE_HARBOR_PYTHON to a Python >= 3.12 that has gyre's extra `harbor`")
    return str(ROOT / named)


def _trial(python: str, backend: str, agent: str, folder: Path, *more: str) -> dict[str, Any]:
    """One trial by the module's command line; the line of JSON that it prints."""
    argv = [python, "-m", "gyre_sdk.environments.harbor_bridge.trial", "--task", str(HARBOR / "edit-file")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "GYRE_SANDBOX": backend, "HARBOR_TELEMETRY": "0"}
    done = subprocess.run(
        [*argv, "--agent", agent, "--trials-dir", str(folder), *more],
        capture_output=True, text=True, env=env, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.harbor
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbor_runs_its_trials_in_our_sandboxes(
    harbor_python: str, best: str, agent: str, reward: float, tmp_path: Path
) -> None:
    found = _trial(harbor_python, best, agent, tmp_path)
    assert found["rewards"] == {"reward": reward}, found


@pytest.mark.harbor
@pytest.mark.timeout(600)
def test_harbors_own_command_takes_our_environment(harbor_python: str, best: str, tmp_path: Path) -> None:
    """`harbor run --env MODULE:CLASS`, as its users type it."""
    argv = [
        str(Path(harbor_python).with_name("harbor")),
        "run",
        "-p",
        str(HARBOR / "edit-file"),
        "-a",
        "oracle",
        "-n",
        "1",
    ]
    argv += ["--env", "gyre_sdk.environments.harbor_bridge.environment:GyreEnvironment", "-o", str(tmp_path), "-y"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "GYRE_SANDBOX": best, "HARBOR_TELEMETRY": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rewards = [path.read_text().strip() for path in tmp_path.rglob("verifier/reward.txt")]
    assert rewards == ["1"], done.stdout[-3000:]


def _terminus(call: ScriptedCall) -> Say:
    """What a model says in Terminus-2's form: look, edit, say that it is done, and again when asked whether it is sure."""
    commands = [["cat /app/settings.ini\n"], [f"{EDIT}\n"], [], []][min(call.number, 3)]
    keys = [{"keystrokes": text, "duration": 0.5} for text in commands]
    return Say(
        json.dumps({"analysis": "so", "plan": "on", "commands": keys, "task_complete": call.number >= 2}), chunk=16
    )


@pytest.mark.harbor
@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_terminus_2_works_through_our_gateway(harbor_python: str, best: str, tmp_path: Path) -> None:
    """An agent of Harbor's own, unchanged: its reward is Harbor's, its tokens are our graph's."""
    renderer = load_renderer(tiny_model_dir(tmp_path / "model"))
    engine = ScriptedEngine(renderer, _terminus)
    gateway = Gateway(engine, renderer, tmp_path / "run", GatewayConfig())
    async with gateway.serving() as url:
        handle = await gateway.open(ExecutionSpec(task="edit-file", harness="terminus-2"))
        more = [
            "--model",
            "openai/policy",
            "--base-url",
            url,
            "--token",
            handle.token,
            "--set",
            "record_terminal_session=false",
        ]
        found = await anyio.to_thread.run_sync(_trial, harbor_python, best, "terminus-2", tmp_path, *more)
        await gateway.seal(handle.execution, Outcome(status="completed", reward=1.0, valid=True))
    assert found["rewards"] == {"reward": 1.0}, found
    graph = BranchGraph.replay(read_records(gateway.wal_path(handle.execution)))
    said = [call for call in graph.calls.values() if call.done]
    assert len(said) == 4
    assert [graph.path_tokens(call.number).tolist() for call in said] == [
        e.input_ids + e.output_ids for e in engine.log
    ]
    kinds = {data["kind"] for _, _, data in graph.to_networkx().edges(data=True)}
    assert kinds == {"continues"}, "one conversation, each turn the token-exact continuation of the last"
    trajectory = json.loads((Path(found["folder"]) / "agent/trajectory.json").read_text())
    assert [step["source"] for step in trajectory["steps"]].count("agent") == 4


def test_any_agent_is_pointed_at_the_gateway() -> None:
    env = agent_env("http://127.0.0.1:8000", "secret")
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/v1"
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert {value for name, value in env.items() if name.endswith("_KEY")} == {"secret"}
