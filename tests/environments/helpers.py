"""Running a fixture task with a command in the agent's place."""

from __future__ import annotations

from pathlib import Path

from gyre_sdk.environments import GradeBudget, Limits, Outcome, Task, load_task, make_sandbox, run_solution, run_steps
from gyre_sdk.wire.records import Status

HARBOR = Path(__file__).parent / "fixtures" / "harbor"
ORACLE, NOP = "oracle", "nop"


async def play(
    task: Task | str,
    agent: str,
    *,
    backend: str,
    keep: Path | None = None,
    budget: GradeBudget | None = None,
    timeout: float = 60,
    limits: Limits | None = None,
) -> Outcome:
    """Run `task` (or the fixture of that name): `agent` is ORACLE, NOP or a shell command run in each step."""
    task = load_task(HARBOR / task) if isinstance(task, str) else task
    sandbox = make_sandbox(task, backend=backend, limits=limits)

    async def run_agent(step: Task) -> tuple[Status, str]:
        if agent == ORACLE:
            assert await run_solution(step, sandbox) == 0
        elif agent != NOP:
            result = await sandbox.exec(agent, timeout=timeout, user=step.steps[0].agent.user)
            if result.timed_out:
                return "timeout", "killed at its deadline"
        return "completed", ""

    try:
        await sandbox.start()
        return await run_steps(task, sandbox, run_agent, keep=keep, budget=budget)
    finally:
        await sandbox.stop()
