"""One execution from start to outcome: sandbox, gateway, agent, deadline, grading, seal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.environments import make_sandbox, run_steps
from gyre_sdk.errors import HarnessError, SandboxError
from gyre_sdk.harness.agents import Agent, AgentContext
from gyre_sdk.harness.recording import OpenExecution, Recording
from gyre_sdk.harness.records import trouble_with_calls
from gyre_sdk.wire.records import Outcome, Status

if TYPE_CHECKING:
    from gyre_sdk.environments import Sandbox, Task


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """What to run. `execution` is 12 lower-case hex digits; `seed` goes to the engine's sampler."""

    execution: str
    group: str
    task: Task
    meta: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How every execution of a run is run."""

    sandbox: str = "auto"
    """Backend of the sandboxes: auto | bwrap | unshare | podman | docker | process."""
    deadline_s: float | None = None
    """Upper bound on an agent's time; a task's own limit holds when it is shorter."""
    start_attempts: int = 2
    """Tries to start a sandbox before the execution counts as an environment error."""
    model: str = "policy"
    """Model name the harness asks for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step in an execution's life, for tables and logs. `state`: starting, running, grading, done."""

    execution: str
    group: str
    task: str
    state: str
    at: float
    deadline_at: float | None = None
    outcome: Outcome | None = None


class Runner:
    """Runs executions against one gateway. Every execution ends sealed, with its sandbox gone, whatever happens."""

    def __init__(
        self,
        recording: Recording,
        gateway_port: int,
        agent: Agent,
        settings: RunnerSettings,
        run_dir: Path,
        report: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.recording = recording
        self.gateway_port = gateway_port
        self.agent = agent
        self.settings = settings
        self.run_dir = run_dir
        self.report = report
        self._ports: dict[str, int] = {}

    def deadline_of(self, task: Task) -> float:
        """Seconds the agent has: the shorter of the task's limit and the run's."""
        limits = [limit for limit in (task.agent_timeout_s, self.settings.deadline_s) if limit is not None]
        return min(limits, default=3600.0)

    async def run(self, order: ExecutionOrder) -> Outcome:
        """Run one execution to its outcome. Only a cancellation (Ctrl-C) escapes, after clean-up and seal."""
        deadline_s = self.deadline_of(order.task)
        self._tell(order, "starting")
        handle = await self.recording.open(
            ExecutionSpec(
                execution=order.execution,
                group=order.group,
                task=order.task.name,
                harness=self.agent.name,
                deadline_s=deadline_s,
                meta=order.meta,
            )
        )
        outcome = Outcome(status="cancelled", message="the run was stopped before the execution ended")
        try:
            outcome = await self._run_in_sandbox(order, handle, deadline_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self.recording.seal(order.execution, outcome)
            self._tell(order, "done", outcome=outcome)
        return outcome

    async def _run_in_sandbox(self, order: ExecutionOrder, handle: OpenExecution, deadline_s: float) -> Outcome:
        folder = self._folder(order)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            sandbox = await self._start_sandbox(order)
        except SandboxError as error:
            # Nothing to grade: the trainer's configuration says whether it counts as a 0.
            return Outcome(status="environment_error", failure="environment", message=str(error), placeholder=True)
        deadline_at = time.monotonic() + deadline_s

        async def run_agent(task: Task) -> tuple[Status, str]:
            limit = task.agent_timeout_s or deadline_s
            return await self._run_agent(order, task, handle, sandbox, min(limit, deadline_at - time.monotonic()))

        try:
            port = await sandbox.expose(self.gateway_port) if self.agent.needs_model else 0
            self._ports[order.execution] = port
            return await run_steps(
                order.task, sandbox, run_agent, keep=folder, on_grading=lambda: self._tell(order, "grading")
            )
        except SandboxError as error:
            return Outcome(status="environment_error", failure="environment", message=str(error))
        finally:
            self._ports.pop(order.execution, None)
            with anyio.CancelScope(shield=True):
                await sandbox.stop()

    async def _start_sandbox(self, order: ExecutionOrder) -> Sandbox:
        for attempt in range(1, self.settings.start_attempts + 1):
            sandbox = make_sandbox(order.task, backend=self.settings.sandbox, read_only_mounts=self.agent.mounts())
            try:
                await sandbox.start()
            except SandboxError:
                await sandbox.stop()
                if attempt == self.settings.start_attempts:
                    raise
            else:
                return sandbox
        raise SandboxError("no attempt to start a sandbox was allowed")

    async def _run_agent(
        self, order: ExecutionOrder, task: Task, handle: OpenExecution, sandbox: Sandbox, limit_s: float
    ) -> tuple[Status, str]:
        """How the agent ended. Raises HarnessError for an end that is not the policy's doing."""
        folder = self._folder(order)
        context = AgentContext(
            task=task,
            instruction=task.instruction,
            base_url=f"http://127.0.0.1:{self._ports[order.execution]}",
            token=handle.token,
            model=self.settings.model,
            deadline_s=limit_s,
            log=folder / "harness.log",
            keep=folder / "harness",
        )
        begun = time.time()
        self._tell(order, "running", deadline_at=begun + limit_s)
        try:
            with anyio.fail_after(max(limit_s, 0.0)):
                code = await self.agent.run(sandbox, context)
        except TimeoutError:
            return "timeout", f"killed at its deadline of {limit_s:.0f} s"
        if code in self.agent.exit_ok:
            return "completed", ""
        ended = f"{self.agent.name} ended with exit code {code}; see {context.log.name}"
        trouble = trouble_with_calls(folder / "wal.gyre", begun) if self.agent.needs_model else ""
        if trouble:
            raise HarnessError(f"{ended}; {trouble}")
        return "harness_error", ended

    def _folder(self, order: ExecutionOrder) -> Path:
        return self.run_dir / "executions" / order.execution

    def _tell(
        self,
        order: ExecutionOrder,
        state: str,
        *,
        deadline_at: float | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        self.report(
            Progress(
                execution=order.execution,
                group=order.group,
                task=order.task.name,
                state=state,
                at=time.time(),
                deadline_at=deadline_at,
                outcome=outcome,
            )
        )


__all__ = ["ExecutionOrder", "Progress", "Runner", "RunnerSettings"]
