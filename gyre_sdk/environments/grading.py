"""From a workspace to an outcome.

| what happened | graded | valid | failure | again? |
|---|---|---|---|---|
| the agent ended, in time | yes | yes | - | |
| the agent ran into its deadline, or its harness ended with an error | yes (what the workspace holds) | yes | agent | |
| the harness could not be started, or broke without the policy's doing | - | no | environment | |
| the agent left a sandbox in which no command runs any more (`rm -rf /`) | as 0 | yes | agent | |
| the verifier gave a reward of 0 | yes | yes | - | |
| the verifier timed out, or left no usable reward | yes | no | verifier | the verifier, within the budget |
| the sandbox broke | - | no | environment | the execution, if the runner wants |
| the sandbox could not be started or built | - | no | environment | the start, by the runner |
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gyre_sdk.environments import rewards
from gyre_sdk.environments.nl2repo.grader import GraderFailed, verify_repo
from gyre_sdk.environments.sandbox.base import Sandbox
from gyre_sdk.environments.task import Step, Task
from gyre_sdk.environments.verify import Verified, VerifierFailed, verify
from gyre_sdk.errors import SandboxError
from gyre_sdk.wire.records import Outcome, Status

_DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class GradeBudget:
    """How much may be spent on one grading."""

    attempts: int = 2
    """Runs of the verifier until one gives a reward."""
    total_s: float = 3600.0
    """No new attempt starts after this many seconds."""
    timeout_factor: float = 1.0
    """Multiplies the task's own verifier timeout."""


@dataclass(slots=True)
class VerifierSlots:
    """Verifiers measure time, so they must not fight for the CPU: at most `count` run at once, whatever the executions do."""

    count: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) // 2))
    _semaphore: asyncio.Semaphore | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a slot."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._loop is not loop:
            self._semaphore, self._loop = asyncio.Semaphore(self.count), loop
        async with self._semaphore:
            yield


SLOTS = VerifierSlots()
"""The slots of this process's verifiers."""


@dataclass(frozen=True, slots=True)
class StepGrade:
    """What one step's verifier said. `rewards` is None when it failed for good."""

    step: str
    rewards: dict[str, float] | None
    metrics: dict[str, float]
    message: str = ""

    @property
    def reward(self) -> float | None:
        """The number that trains."""
        return None if self.rewards is None else rewards.scalar(self.rewards)


async def grade(
    task: Task,
    sandbox: Sandbox,
    *,
    status: Status = "completed",
    message: str = "",
    keep: Path | None = None,
    budget: GradeBudget | None = None,
) -> Outcome:
    """Grade what the workspace holds. `status` and `message` say how the agent ended; `keep` takes the verifier's output.

    Every process of the agent is dead before a test arrives. Never raises for what went wrong inside; the outcome says it.
    """
    if status in ("environment_error", "cancelled"):
        return Outcome(status=status, failure="environment" if status == "environment_error" else None, message=message)
    try:
        done = [await grade_step(task, task.steps[-1], sandbox, keep=keep, budget=budget)]
    except SandboxError as error:
        return Outcome(status="environment_error", failure="environment", message=f"while grading: {error}")
    return combine(task, done, status=status, message=message)


async def grade_step(
    task: Task, step: Step, sandbox: Sandbox, *, keep: Path | None = None, budget: GradeBudget | None = None
) -> StepGrade:
    """Grade one step. Raises SandboxError when the sandbox breaks."""
    budget = budget or GradeBudget()
    timeout_s = (step.verifier.phase.timeout_s or _DEFAULT_TIMEOUT_S) * budget.timeout_factor
    with tempfile.TemporaryDirectory(prefix="gyre-verifier-") as folder:
        kept = (keep / "verifier" if keep is not None else Path(folder) / "verifier") / (
            "" if len(task.steps) == 1 else step.name
        )
        begun, problems, attempt = time.monotonic(), [], 0
        for attempt in range(1, budget.attempts + 1):
            if attempt > 1 and time.monotonic() - begun > budget.total_s:
                break
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            try:
                async with SLOTS.take():
                    done = await _verify(task, step, sandbox, kept, timeout_s)
            except (VerifierFailed, GraderFailed) as error:
                problems.append(str(error))
                continue
            spent = {"verifier_s": time.monotonic() - begun, "verifier_attempts": float(attempt)}
            return StepGrade(step.name, done.rewards, done.metrics | spent, done.message)
        metrics = {"verifier_s": time.monotonic() - begun, "verifier_attempts": float(attempt)}
        return StepGrade(step.name, None, metrics, f"no reward from the verifier: {problems[-1]}")


async def _verify(task: Task, step: Step, sandbox: Sandbox, kept: Path, timeout_s: float) -> Verified:
    """By the task's format."""
    if task.repo is None:
        return await verify(task, step, sandbox, kept, timeout_s)
    found = await verify_repo(task, sandbox, kept, timeout_s)
    return Verified({"reward": found.reward}, found.metrics, found.message)


def combine(task: Task, grades: list[StepGrade], *, status: Status, message: str = "") -> Outcome:
    """One outcome of a task's graded steps; steps that were never reached count as 0."""
    metrics: dict[str, float] = {}
    for number, done in enumerate(grades):
        prefix = "" if len(task.steps) == 1 else f"step{number + 1}_"
        metrics |= {prefix + key: value for key, value in (done.metrics | (done.rewards or {})).items()}
    failed = next((done for done in grades if done.rewards is None), None)
    if failed is not None:
        return Outcome(status=status, failure="verifier", message=failed.message, metrics=metrics)
    values = [done.reward or 0.0 for done in grades] + [0.0] * (len(task.steps) - len(grades))
    reward = values[-1] if task.reward_strategy == "final" else sum(values) / len(values)
    message = message or next((done.message for done in grades if done.message), "")
    broke = any("sandbox_broken" in done.metrics for done in grades)
    culprit = "agent" if status in ("timeout", "harness_error") or broke else None
    return Outcome(status=status, reward=reward, valid=True, failure=culprit, message=message, metrics=metrics)  # type: ignore[arg-type]
