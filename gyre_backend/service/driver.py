"""The scheduler's loop: events in, `decide`, actions out.

What an action takes time for runs as a task and reports back as an event. Actions of the open step run in one
lane, in order; the loss of
the core goes through the same lane, so that it is told apart from a step that was committed just before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from gyre_backend.cells import state as s
from gyre_backend.cells.policy import PolicyConfig, decide
from gyre_backend.errors import CellError, TrainingError
from gyre_backend.service.closing import close_step
from gyre_backend.service.intake import Intake
from gyre_backend.service.moves import bring_back, to_rollout, to_training
from gyre_backend.service.run_state import RunState
from gyre_backend.service.steps import OpenStep
from gyre_sdk.graph import BranchGraph

log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[None]]


class Driver:
    """Drives one run from its ledger's state to its last step."""

    def __init__(self, run: RunState, policy: PolicyConfig) -> None:
        self.run_state = run
        self.policy = policy
        self.intake = Intake(run)
        self.state = s.initial(run.config.cells.count, run.config.cells.slots, version=run.version)
        self._events: asyncio.Queue[s.Event] = asyncio.Queue()
        self._lane: asyncio.Queue[Job] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._told: set[str] = set()
        self._failure: BaseException | None = None
        self._stopped = ""
        self._first_step = run.version

    # -- from outside

    def post(self, event: s.Event) -> None:
        """Hand an event to the loop."""
        self._events.put_nowait(event)

    def sealed(self, graph: BranchGraph) -> None:
        """The ingest has a whole execution."""
        row = self.intake.sealed(graph)
        if row is not None:
            self._spawn(self._evaluate(row))

    def runner_replaced(self) -> None:
        """Another runner has taken over: what the old one was running is dropped."""
        self.intake.abandon_open_groups()

    def cell_lost(self, index: int, why: str) -> None:
        """A cell's process is gone."""
        run = self.run_state
        cell = run.fleet.cells[index]
        run.routing.lost(cell.name)
        run.training.discard(index)
        run.metrics.event("cell lost", cell=cell.name, why=why)
        if index == 0:
            if run.step is not None:
                run.step.close()
            self._lane.put_nowait(self._core_lost)
            return
        if run.step is not None:
            run.step.drop(cell)
        self.post(s.CellLost(run.now(), cell=index))
        self._spawn(self._bring_back(index))

    async def _core_lost(self) -> None:
        self.post(s.CellLost(self.run_state.now(), cell=0))
        self._spawn(self._bring_back(0))

    def stop(self, reason: str) -> None:
        """End the run after the present event."""
        self._stopped = reason
        self.post(s.Tick(self.run_state.now()))

    # -- the loop

    async def run(self) -> str:
        """Until the last step, or `stop`. Returns why it ended. Raises what can't be recovered from."""
        run = self.run_state
        # Trained and dropped groups stay on disk: a long run's history is not read again at every start.
        needed = {e for row in run.ledger.groups("dispatched", "ready", "assigned") for e in row.executions}
        await self._restore(await run.ingest.resume(needed.__contains__))
        self._spawn(self._run_lane())
        await run.orders.registered.wait()
        self.post(s.Tick(run.now()))
        try:
            while not self._stopped:
                event = await self._next_event()
                if self._failure is not None:
                    raise self._failure
                if self._finished(event):
                    break
                self._take(event)
        finally:
            await self._cancel_tasks()
        return self._stopped

    async def _restore(self, graphs: dict[str, BranchGraph]) -> None:
        """What the ledger knows, as scheduler state; then what ended while nobody looked."""
        run = self.run_state
        open_groups = run.ledger.groups("dispatched")
        ready = []
        for row in run.ledger.groups("ready"):
            prepared = await self.intake.get(row.id)
            ready.append(s.Group(row.id, row.version, self.intake.work(prepared)))
        in_flight: dict[int, int] = {}
        for row in open_groups:
            in_flight[row.version] = in_flight.get(row.version, 0) + 1
        dispatched, finished = run.ledger.counts()
        state = s.initial(
            run.config.cells.count, run.config.cells.slots, version=run.version, ready=tuple(ready), now=run.now()
        )
        self.state = replace(
            state,
            dispatched=dispatched,
            started=finished,
            finished=finished,
            inflight=tuple(sorted(in_flight.items())),
            num_inflight=len(open_groups),
        )
        self.intake.start_after(r.number for r in run.ledger.groups("ready", "assigned", "trained", "dropped"))
        for graph in graphs.values():
            if graph.outcome is not None:
                self.sealed(graph)
        for row in open_groups:
            complete = self.intake.completed(row.id)
            if complete is not None:
                self._spawn(self._evaluate(complete))
        for row in run.ledger.groups("trained", "dropped"):
            for execution in row.executions:
                run.ingest.forget(execution)

    async def _next_event(self) -> s.Event:
        """The next event, or a Tick when the policy asked to be woken."""
        wake = self.state.wake_at
        timeout = None if wake is None else max(0.0, wake - self.run_state.now())
        try:
            return await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return s.Tick(self.run_state.now())

    def _take(self, event: s.Event) -> None:
        ignored = self.state.ignored
        self.state, actions = decide(self.state, event, self.policy)
        if self.state.ignored != ignored:
            log.debug("event without effect: %s", event)
        for action in actions:
            self._perform(action)

    def _finished(self, event: s.Event) -> bool:
        run, steps = self.run_state, self.run_state.config.train.steps
        if isinstance(event, s.Published) and steps and event.version >= steps:
            self.state = replace(self.state, version=event.version)
            self._stopped = f"{steps} optimizer steps done"
        elif steps and run.version >= steps and self._first_step >= steps:
            self._stopped = f"{steps} optimizer steps were done already"
        elif self.intake.dropped_in_a_row >= run.config.train.max_dropped:
            self._stopped = f"{self.intake.dropped_in_a_row} groups in a row had nothing to train"
        return bool(self._stopped)

    # -- actions

    def _perform(self, action: s.Action) -> None:
        run = self.run_state
        if isinstance(action, s.Dispatch):
            for _ in range(action.groups):
                run.orders.dispatch_group(action.version)
        elif isinstance(action, s.MoveToTraining):
            self._spawn(to_training(run, action.cell))
        elif isinstance(action, s.MoveToRollout):
            self._spawn(to_rollout(run, action.cell))
        elif isinstance(action, s.BeginStep):
            version = action.version
            self._lane.put_nowait(lambda: self._begin(version))
        elif isinstance(action, s.Assign):
            names = [str(group) for group in action.groups]
            self._lane.put_nowait(lambda: self._assign(names))
        elif isinstance(action, s.EndStep):
            self._lane.put_nowait(self._end)
        elif isinstance(action, s.AbortStep):
            version = action.version
            self._lane.put_nowait(lambda: self._abort(version))

    async def _begin(self, version: int) -> None:
        run = self.run_state
        step = OpenStep(version, run.fleet, self._step_changed)
        self._told = set()
        run.step = step
        await step.join(run.fleet.core)
        step.snapshot = await run.fleet.core.ask().publish()
        for index in sorted(run.training - {0}):
            cell = run.fleet.cells[index]
            try:
                await step.join(cell)
            except CellError as error:
                run.fleet.fail(index, str(error))

    async def _assign(self, names: list[str]) -> None:
        run = self.run_state
        step = run.step
        if step is None:
            return
        prepared = [await self.intake.get(name) for name in names]
        run.ledger.assign(step.step, names)
        step.assign(prepared)

    async def _end(self) -> None:
        run = self.run_state
        step = run.step
        if step is None:
            return
        if await close_step(run, step):
            run.step = None
            self.intake.trained(step.groups)
            self.post(s.Published(run.now(), version=run.version))

    async def _abort(self, version: int) -> None:
        run = self.run_state
        if run.step is not None:
            run.step.close()
            run.step = None
        groups = run.ledger.abort_step(version)
        run.metrics.event("step aborted", step=version, groups=len(groups))

    def _step_changed(self) -> None:
        """Tell the scheduler what the open step's queue looks like, and which groups have come or gone."""
        run, step = self.run_state, self.run_state.step
        if step is None:
            return
        if step.failure is not None:
            self._fail(step.failure)
            return
        micro_steps, tokens = step.queued()
        self.post(s.QueueLevel(run.now(), micro_steps=micro_steps, work=tokens * run.seconds_per_token))
        trained = step.trained()
        for group in sorted(self._told - trained):
            self.post(s.GroupRequeued(run.now(), group=group))
        for group in sorted(trained - self._told):
            self.post(s.GroupTrained(run.now(), group=group))
        self._told = trained

    # -- tasks

    async def _evaluate(self, row: Any) -> None:
        await self.intake.evaluate(row)

    async def _bring_back(self, index: int) -> None:
        await bring_back(self.run_state, index)

    async def _run_lane(self) -> None:
        """Jobs of the step, in order. A core that is gone ends a job; its loss is a later job of the same
        lane.
        """
        while True:
            job = await self._lane.get()
            try:
                await job()
            except CellError as error:
                core = self.run_state.fleet.core
                log.warning("the step could not go on: %s", error)
                if core.up:
                    self.run_state.fleet.fail(0, str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        """The run can't go on; the loop raises it."""
        self._failure = self._failure or error or TrainingError("a task of the run ended without saying why")
        self.post(s.Tick(self.run_state.now()))

    async def _cancel_tasks(self) -> None:
        if self.run_state.step is not None:
            self.run_state.step.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """For `GET /v1/status`."""
        run, state = self.run_state, self.state
        cells = []
        for cell, known in zip(run.fleet.cells, state.cells, strict=True):
            cells.append(
                {
                    "name": cell.name,
                    "role": known.role.value,
                    "version": cell.version,
                    "busy_s": round(cell.busy_s, 2),
                    "restarts": cell.restarts,
                    "since_s": round(time.monotonic() - known.since, 1),
                }
            )
        return {
            "step": len(run.ledger.steps()),
            "policy_version": run.version,
            "phase": self._phase(),
            "dispatched": state.dispatched,
            "started": state.started,
            "finished": state.finished,
            "waterlevel": state.waterlevel,
            "capacity": state.capacity,
            "ready_groups": len(state.ready),
            "cells": cells,
            "last": run.metrics.last,
        }

    def _phase(self) -> str:
        run, state = self.run_state, self.state
        if not run.orders.registered.is_set():
            return "waiting for a runner"
        if state.phase is s.Phase.OPEN:
            done = 0 if run.step is None else len(run.step.results)
            total = 0 if run.step is None else run.step.book.total
            return f"training ({done} of {total} micro-steps)"
        if state.phase is s.Phase.CLOSING:
            return "optimizer step"
        return f"rollout ({state.waterlevel} executions unfinished)"
