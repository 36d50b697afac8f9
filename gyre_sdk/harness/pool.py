"""Many executions at once: fixed groups (`gyre run`) or the orders of a backend (`gyre train`)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.records import sealed_outcomes, wal_paths
from gyre_sdk.harness.runner import ExecutionOrder, Runner
from gyre_sdk.wire.records import Outcome

if TYPE_CHECKING:
    from gyre_sdk.environments import Task

PLAN_FILE = "plan.json"


class PlannedExecution(msgspec.Struct, frozen=True):
    """One line of a run's plan: which execution belongs to which group and task."""

    execution: str
    group: str
    task: str


@dataclass(frozen=True, slots=True)
class Finished:
    """An execution and how it ended."""

    order: ExecutionOrder
    outcome: Outcome


def new_execution_id() -> str:
    """12 random lower-case hex digits."""
    return secrets.token_hex(6)


def plan_groups(tasks: Sequence[Task], group_size: int) -> list[PlannedExecution]:
    """`group_size` executions of each task, group by group."""
    return [
        PlannedExecution(execution=new_execution_id(), group=f"{task.name}-{number:04d}", task=task.name)
        for number, task in enumerate(tasks)
        for _ in range(group_size)
    ]


def load_or_make_plan(
    run_dir: Path, make: Callable[[], list[PlannedExecution]], *, resume: bool
) -> list[PlannedExecution]:
    """The plan of a run is written before its first execution, so that a stopped run can go on where it was."""
    path = run_dir / PLAN_FILE
    if path.is_file():
        if not resume:
            raise ConfigError(f"{run_dir} holds a run already; give another --run-dir, or --resume to go on")
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=list[PlannedExecution])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        plan = _renewed(run_dir, plan)
        _write_plan(path, plan)
        return plan
    if resume:
        raise ConfigError(f"nothing to resume: there is no {path}")
    plan = make()
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_plan(path, plan)
    return plan


def _renewed(run_dir: Path, plan: list[PlannedExecution]) -> list[PlannedExecution]:
    """An execution that was begun but did not end in its own right is run again, as a new one: its record stays as it is."""
    ended = sealed_outcomes(run_dir)
    begun = {path.parent.name for path in wal_paths(run_dir)}
    return [
        msgspec.structs.replace(line, execution=new_execution_id())
        if line.execution in begun and line.execution not in ended
        else line
        for line in plan
    ]


def _write_plan(path: Path, plan: list[PlannedExecution]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    temporary.replace(path)


class Pool:
    """At most `slots` executions at once; results arrive in the order in which they end."""

    def __init__(self, runner: Runner, slots: int) -> None:
        if slots < 1:
            raise ConfigError(f"slots must be at least 1, not {slots}")
        self.runner = runner
        self._limiter = anyio.CapacityLimiter(slots)
        self._scopes: dict[str, anyio.CancelScope] = {}

    async def run_one(self, order: ExecutionOrder) -> Finished:
        """Wait for a slot, then run. Cancelled by `cancel`, the execution still ends sealed."""
        async with self._limiter:
            with anyio.CancelScope() as scope:
                self._scopes[order.execution] = scope
                try:
                    outcome = await self.runner.run(order)
                finally:
                    del self._scopes[order.execution]
                return Finished(order, outcome)
            return Finished(order, Outcome(status="cancelled", message="cancelled by the backend"))

    def cancel(self, execution: str) -> bool:
        """Stop one execution that is running here. False when it is not."""
        scope = self._scopes.get(execution)
        if scope is not None:
            scope.cancel()
        return scope is not None

    async def run_all(self, orders: Iterable[ExecutionOrder]) -> AsyncIterator[Finished]:
        """Run a fixed list."""
        todo = list(orders)
        send, receive = anyio.create_memory_object_stream[Finished](max(1, len(todo)))

        async def one(order: ExecutionOrder) -> None:
            await send.send(await self.run_one(order))

        async with send, receive, anyio.create_task_group() as group:
            for order in todo:
                group.start_soon(one, order)
            for _ in todo:
                yield await receive.receive()
