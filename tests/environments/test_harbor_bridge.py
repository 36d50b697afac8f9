"""Harbor's own trials in our sandboxes. Needs a Python 3.12 or newer with the extra `harbor`, named by $GYRE_HARBOR_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gyre_sdk.environments.harbor_bridge.trial import agent_env

from .helpers import HARBOR

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def harbor_python() -> str:
    named = os.environ.get("GYRE_HARBOR_PYTHON")
    if not named:
        pytest.skip("set GYRE_HARBOR_PYTHON to a Python >= 3.12 that has gyre's extra `harbor`")
    return named


@pytest.mark.environments
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbor_runs_its_trials_in_our_sandboxes(
    harbor_python: str, best: str, agent: str, reward: float, tmp_path: Path
) -> None:
    argv = [harbor_python, "-m", "gyre_sdk.environments.harbor_bridge.trial", "--task", str(HARBOR / "edit-file")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "GYRE_SANDBOX": best, "HARBOR_TELEMETRY": "0"}
    done = subprocess.run(
        [*argv, "--agent", agent, "--trials-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rewards"] == {"reward": reward}, found


def test_any_agent_is_pointed_at_the_gateway() -> None:
    env = agent_env("http://127.0.0.1:8000", "secret")
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/v1"
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert {value for name, value in env.items() if name.endswith("_KEY")} == {"secret"}
