"""From sealed executions to groups that the scheduler may train."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import anyio.to_thread
import msgspec

from gyre_backend.cells import state as s
from gyre_backend.errors import IngestError, TrainingError
from gyre_backend.ledger import GroupRow
from gyre_backend.service.groups import PreparedGroup, credit_of, prepare, selection_config
from gyre_backend.service.run_state import RunState
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire.records import Opened

log = logging.getLogger(__name__)


class Intake:
    """Counts executions, and tells the scheduler of groups that are complete."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._prepared: dict[str, PreparedGroup] = {}
        self._held: dict[int, list[s.Event]] = {}
        self._next = 0
        self._complete: set[str] = set()
        self.dropped_in_a_row = 0

    def admit(self, opened: Opened) -> None:
        """Refuse executions that nobody ordered."""
        if self._run.ledger.group_of(opened.execution) != opened.group:
            raise IngestError(f"execution {opened.execution} of group {opened.group!r} was not ordered", status=404)

    def opened(self, graph: BranchGraph) -> None:
        """p + 1."""
        self._run.post(s.ExecutionStarted(self._run.now()))

    def sealed(self, graph: BranchGraph) -> GroupRow | None:
        """f + 1; the group, when this was its last execution."""
        run, execution = self._run, graph.execution
        if not run.ledger.seal(execution, msgspec.to_builtins(graph.outcome)):
            return None
        run.post(s.ExecutionFinished(run.now()))
        return self.completed(run.ledger.group_of(execution) or "")

    def completed(self, group: str) -> GroupRow | None:
        """The group if all its executions have ended and it was not looked at yet."""
        if group in self._complete or not all(self._run.ledger.outcomes(group).values()):
            return None
        row = self._run.ledger.group(group)
        if row is None or row.state != "dispatched":
            return None
        self._complete.add(group)
        return row

    async def evaluate(self, row: GroupRow) -> None:
        """Select and plan a complete group; it becomes ready, or is dropped when there is nothing to
        train.
        """
        run = self._run
        prepared = await self._prepare(row)
        event: s.Event
        if prepared is None:
            run.ledger.drop(row.id)
            self._forget(row)
            self.dropped_in_a_row += 1
            run.metrics.event("group dropped", group=row.id, task=row.task)
            event = s.GroupDropped(run.now(), version=row.version)
        else:
            run.metrics.selection(row.id, prepared.taken)
            run.ledger.ready(row.id)
            self._prepared[row.id] = prepared
            self.dropped_in_a_row = 0
            event = s.GroupReady(run.now(), group=row.id, version=row.version, work=self.work(prepared))
        self._deliver(row.number, event)

    def _deliver(self, number: int, event: s.Event) -> None:
        """At once, or in the order of dispatch when the configuration wants steps to be reproducible."""
        if self._run.config.train.data_order == "ready":
            self._run.post(event)
            return
        self._held.setdefault(number, []).append(event)
        while self._next in self._held:
            for held in self._held.pop(self._next):
                self._run.post(held)
            self._next += 1

    def start_after(self, numbers: Iterable[int]) -> None:
        """After a restart: these groups are settled, the first that is not comes next."""
        settled = set(numbers)
        while self._next in settled:
            self._next += 1

    def work(self, prepared: PreparedGroup) -> float:
        """Estimated training time, cell-seconds."""
        return sum(prepared.micro_tokens) * self._run.seconds_per_token

    async def get(self, group: str) -> PreparedGroup:
        """A ready group's micro-steps; made again from its records when they are not in memory (after a
        restart).
        """
        if group not in self._prepared:
            row = self._run.ledger.group(group)
            prepared = None if row is None else await self._prepare(row)
            if prepared is None:
                raise TrainingError(f"group {group} has nothing to train any more; its records have changed")
            self._prepared[group] = prepared
        return self._prepared[group]

    async def _prepare(self, row: GroupRow) -> PreparedGroup | None:
        run = self._run
        graphs = [await run.ingest.graph(execution) for execution in row.executions]
        work = functools.partial(
            prepare,
            row.id,
            graphs,
            selection_config(run.config, run.facts.estimator),
            weighting=run.facts.weighting,
            micro_tokens=run.config.train.micro_tokens,
            whole_replies=run.facts.whole_replies,
            credit=credit_of(run.config),
        )
        return await anyio.to_thread.run_sync(work)

    def trained(self, groups: Iterable[str]) -> None:
        """These groups are part of published weights: let go of their memory."""
        for group in groups:
            self._prepared.pop(group, None)
            row = self._run.ledger.group(group)
            if row is not None:
                self._forget(row)

    def _forget(self, row: GroupRow) -> None:
        for execution in row.executions:
            self._run.ingest.forget(execution)

    def abandon_open_groups(self) -> None:
        """Their runner is gone: what it had not finished is dropped, and the scheduler orders other groups
        instead.
        """
        run = self._run
        for row in run.ledger.groups("dispatched"):
            if row.id in self._complete:
                continue
            unfinished = [e for e, outcome in run.ledger.outcomes(row.id).items() if outcome is None]
            for execution in unfinished:
                run.ledger.seal(execution, {"status": "cancelled", "valid": False, "message": "its runner is gone"})
            run.ledger.drop(row.id)
            self._complete.add(row.id)
            run.post(s.ExecutionFinished(run.now(), count=len(unfinished)))
            self._deliver(row.number, s.GroupDropped(run.now(), version=row.version))
            log.info("group %s was abandoned by its runner", row.id)
