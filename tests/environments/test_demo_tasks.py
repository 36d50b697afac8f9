"""The three demo tasks: the oracle scores 1, doing nothing scores 0, and there is part credit in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_sdk.environments import Task, grade, load_tasks, make_sandbox

from .conftest import EXAMPLES

TASKS = {task.name: task for task in load_tasks(EXAMPLES)}
PARTS = {"make-file": "touch any", "write-line": "echo hi > greeting.txt", "make-folder": "mkdir other"}
pytestmark = pytest.mark.anyio


async def _score(task: Task, backend: str, command: str | None, keep: Path) -> float:
    sandbox = make_sandbox(task, backend=backend)
    try:
        await sandbox.start()
        if command is None:
            assert task.steps[0].solution is not None
            await sandbox.upload(task.steps[0].solution, "/solution")
            command = 'bash "${GYRE_ROOT:-}/solution/solve.sh"'
        await sandbox.exec(command)
        outcome = await grade(task, sandbox, keep=keep)
    finally:
        await sandbox.stop()
    assert outcome.valid
    assert outcome.reward is not None
    return outcome.reward


@pytest.mark.parametrize("name", sorted(TASKS))
async def test_oracle_nop_and_part(name: str, best: str, tmp_path: Path) -> None:
    task = TASKS[name]
    assert await _score(task, best, None, tmp_path / "oracle") == 1
    assert await _score(task, best, "true", tmp_path / "nop") == 0
    assert 0 < await _score(task, best, PARTS[name], tmp_path / "part") < 1
    assert (tmp_path / "part/verifier/test-stdout.txt").exists()


async def test_the_process_backend_can_grade_them_too(tmp_path: Path) -> None:
    assert await _score(TASKS["make-folder"], "process", None, tmp_path) == 1
