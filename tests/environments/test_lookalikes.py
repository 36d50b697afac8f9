"""`gyre run` on a checkout in the form of real tasks, as a user types it: the oracle scores 1 on each, doing nothing 0, no Docker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_sdk.harness.records import summaries

from . import lookalikes

pytestmark = [pytest.mark.environments, pytest.mark.usefixtures("python313", "best"), pytest.mark.timeout(1800)]
NEEDS_INDEX = "number-service"
"""Its solution installs from the package index."""


def _run(checkout: Path, agent: str, only: list[str], run_dir: Path) -> dict[str, float | None]:
    argv = [
        str(Path(sys.executable).with_name("gyre")),
        "run",
        "-t",
        str(checkout),
        "-a",
        agent,
        "--only",
        ",".join(only),
    ]
    env = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [*argv, "-j", "2", "--run-dir", str(run_dir)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for one in summaries(run_dir):
        assert one.outcome is not None
        assert one.outcome.valid, (one.opened.task, one.outcome)
        found[one.opened.task] = one.outcome.reward
    return found


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_with_the_network_as_the_tasks_have_it(agent: str, reward: float, tmp_path: Path) -> None:
    names = sorted(lookalikes.FILES)
    found = _run(lookalikes.write(tmp_path / "checkout"), agent, names, tmp_path / "run")
    assert found == dict.fromkeys(names, reward)


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_without_network(agent: str, reward: float, tmp_path: Path) -> None:
    names = sorted(lookalikes.FILES.keys() - {NEEDS_INDEX})
    found = _run(lookalikes.write(tmp_path / "checkout", offline=True), agent, names, tmp_path / "run")
    assert found == dict.fromkeys(names, reward)
