"""Running a task's steps: prepare, agent, grade; once for a plain task, in order for one with several steps."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from gyre_sdk.environments.grading import GradeBudget, StepGrade, combine, grade_step
from gyre_sdk.environments.prepare import wait_healthy
from gyre_sdk.environments.sandbox.base import Sandbox
from gyre_sdk.environments.task import Step, Task
from gyre_sdk.environments.verify import keep_artifacts
from gyre_sdk.errors import HarnessError, SandboxError
from gyre_sdk.wire.records import Outcome, Status

RunAgent = Callable[[Task], Awaitable[tuple[Status, str]]]
"""Runs the agent on a task of one step; returns how it ended and a message. Raises HarnessError when the harness broke without the
policy's doing: that is not graded."""
_SETUP_S = 600.0


async def run_steps(
    task: Task,
    sandbox: Sandbox,
    run_agent: RunAgent,
    *,
    keep: Path | None = None,
    budget: GradeBudget | None = None,
    on_grading: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run every step of `task` in a started sandbox and grade it; never raises for what goes wrong inside.

    `run_agent` gets the task cut down to the step at hand. The steps end early when one's reward is below its `min_reward`, when the
    agent ran out of time, or when a verifier failed for good.
    """
    grades: list[StepGrade] = []
    status: Status = "completed"
    message = ""
    try:
        for step in task.steps:
            await prepare_step(sandbox, task, step)
            status, message = await run_agent(task.only(step))
            if status in ("environment_error", "cancelled"):
                failure = "environment" if status == "environment_error" else None
                return Outcome(status=status, failure=failure, message=message)  # type: ignore[arg-type]
            on_grading()
            grades.append(await grade_step(task, step, sandbox, keep=keep, budget=budget))
            if keep is not None:
                await keep_artifacts(task, step, sandbox, keep / "artifacts")
            if status != "completed" or not _goes_on(step, grades[-1]):
                break
    except SandboxError as error:
        return Outcome(status="environment_error", failure="environment", message=str(error))
    except HarnessError as error:
        return Outcome(status="harness_error", failure="environment", message=str(error))
    return combine(task, grades, status=status, message=message)


def _goes_on(step: Step, done: StepGrade) -> bool:
    """Whether a step's reward allows the next one."""
    if done.rewards is None or done.reward is None:
        return False
    if step.min_reward is None:
        return True
    if isinstance(step.min_reward, Mapping):
        return all(done.rewards.get(name, 0.0) >= least for name, least in step.min_reward.items())
    return done.reward >= step.min_reward


async def prepare_step(sandbox: Sandbox, task: Task, step: Step) -> None:
    """Files of the step into the working directory, its setup.sh, its healthcheck. Raises SandboxError."""
    if step.workdir_files is not None:
        await sandbox.upload(step.workdir_files, task.workdir)
        if (step.workdir_files / "setup.sh").is_file():
            done = await sandbox.exec("bash ./setup.sh && rm -f ./setup.sh", timeout=_SETUP_S)
            if done.rc != 0:
                raise SandboxError(
                    f"{step.workdir_files / 'setup.sh'} ended with {done.rc}: {done.stderr.strip()[-200:]}"
                )
    if step.healthcheck is not None:
        await wait_healthy(sandbox, step.healthcheck)


async def run_solution(task: Task, sandbox: Sandbox, *, log: Path | None = None) -> int:
    """The oracle: run the solution of the task's first step as the agent would work. Returns its exit code; 0 when there is none."""
    step = task.steps[0]
    if step.solution is None:
        return 0
    await sandbox.upload(step.solution, "/solution", fresh=True)
    root = "" if sandbox.capabilities.rootfs else '"$GYRE_ROOT"'
    result = await sandbox.exec(
        f"bash {root}{shlex.quote('/solution/solve.sh')}",
        env={"DEBIAN_FRONTEND": "noninteractive", **task.solution_env},
        timeout=step.agent.timeout_s,
        user=step.agent.user,
    )
    if log is not None:
        with log.open("a") as file:
            file.write(result.stdout + result.stderr)
    return result.rc if not result.timed_out else 124
