"""Six tasks in Harbor's format that use what real ones use: the oracle scores 1, nothing scores 0, half the work scores in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_sdk.environments import GradeBudget, load_tasks

from .helpers import HARBOR, NOP, ORACLE, play

PARTS = {
    "edit-file": "sed -i 's/sever/server/' settings.ini",
    "fix-bug": "printf 'def median(values):\\n    return sorted(values)[len(values) // 2]\\n' > stats.py",
    "run-service": "cd /tmp && setsid python3 -m http.server $SHOP_PORT >/dev/null 2>&1 & sleep 1",
    "two-steps": "echo walls > /app/plan.txt",
    "apart": "echo guessed > notes.txt",
    "flaky": "touch /app/tool/touched",
}
pytestmark = pytest.mark.anyio


def test_there_are_six() -> None:
    assert sorted(task.folder.name for task in load_tasks(HARBOR)) == sorted(PARTS)


@pytest.mark.parametrize("name", sorted(PARTS))
async def test_oracle_nop_and_part(name: str, best: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name == "fix-bug":
        request.getfixturevalue("python313")
    oracle = await play(name, ORACLE, backend=best, keep=tmp_path)
    assert (oracle.reward, oracle.valid, oracle.failure) == (1.0, True, None), oracle
    nop = await play(name, NOP, backend=best)
    assert (nop.reward, nop.valid) == (0.0, True), nop
    part = await play(name, PARTS[name], backend=best)
    assert part.reward is not None, part
    assert 0 < part.reward < 1, part
    if name == "fix-bug":
        assert (part.metrics["ctrf_tests"], part.metrics["ctrf_passed"]) == (4, 2)


async def test_what_is_kept_of_a_task_with_steps(best: str, tmp_path: Path) -> None:
    outcome = await play("two-steps", ORACLE, backend=best, keep=tmp_path)
    assert outcome.metrics["step1_lines"] == 2
    assert (tmp_path / "verifier/plan/reward.json").exists()
    assert (tmp_path / "verifier/build/reward.txt").exists()
    assert (tmp_path / "artifacts/app__plan.txt").read_text() == "walls\nroof\n"
    assert (tmp_path / "artifacts/app__out/roof").exists()


async def test_a_verifier_that_breaks_is_tried_again_within_the_budget(best: str) -> None:
    outcome = await play("flaky", ORACLE, backend=best)
    assert outcome.metrics["verifier_attempts"] == 2
    once = await play("flaky", ORACLE, backend=best, budget=GradeBudget(attempts=1))
    assert (once.valid, once.reward, once.failure) == (False, None, "verifier")
    assert "could not reach the judge" in once.message


async def test_a_timed_out_agent_is_graded_for_what_it_left(best: str) -> None:
    outcome = await play("edit-file", f"{PARTS['edit-file']}; sleep 100", backend=best, timeout=4)
    assert (outcome.status, outcome.reward, outcome.valid, outcome.failure) == ("timeout", 0.5, True, "agent")
