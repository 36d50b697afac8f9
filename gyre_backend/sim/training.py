"""The training side of the simulator: the shared queue of micro-steps, claimed by whichever training cell is
free."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from gyre_backend.cells import state as s
from gyre_backend.errors import SchedulerError

if TYPE_CHECKING:
    from gyre_backend.sim.engine import SimGroup, Simulator


class Training:
    """Queue, claims and the open step."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.groups: dict[s.GroupId, SimGroup] = {}
        """Ready or in the open step."""
        self.queue: deque[tuple[s.GroupId, float]] = deque()
        self.queued_work = 0.0
        self.left: dict[s.GroupId, int] = {}
        """Micro-steps of a member group that aren't done."""
        self.busy: dict[int, float] = {}
        """Claiming cells, and when they will be free."""
        self.assigned: set[s.GroupId] = set()
        """Every group ever assigned: none may come back."""
        self.trained_work = 0.0
        """Work of all finished micro-steps, cell-seconds."""
        self.claim_due = False

    def busy_until(self, cell: int) -> float:
        """When the cell has finished what it claimed."""
        return self.busy.get(cell, self.sim.now)

    def begin(self, version: int) -> None:
        """A step opens."""
        self.sim.recorder.begin(self.sim.now, version)

    def assign(self, groups: tuple[s.GroupId, ...]) -> None:
        """Queue the groups' micro-steps."""
        pieces = self.sim.costs.micro_steps_per_group
        for group in groups:
            if group in self.left or group in self.assigned:
                raise SchedulerError(f"group {group} assigned twice")
            self.assigned.add(group)
            work = self.groups[group].work
            self.left[group] = pieces
            self.queue.extend([(group, work / pieces)] * pieces)
            self.queued_work += work
        self._claim_soon()

    def _claim_soon(self) -> None:
        """Claim once the policy has been heard out: it must not be called from within itself."""
        if not self.claim_due:
            self.claim_due = True
            self.sim.at(self.sim.now, self._claim_due)

    def _claim_due(self, _: None) -> None:
        self.claim_due = False
        self.claim()

    def claim(self) -> None:
        """Every free training cell takes a micro-step."""
        sim = self.sim
        took = False
        for index, cell in enumerate(sim.state.cells):
            if not self.queue:
                break
            if cell.role is s.Role.TRAINING and index not in self.busy:
                self._take(index)
                took = True
        if took:
            sim.send(s.QueueLevel(sim.now, len(self.queue), max(self.queued_work, 0.0)))

    def _take(self, cell: int) -> None:
        group, work = self.queue.popleft()
        self.queued_work = self.queued_work - work if self.queue else 0.0
        done = self.sim.now + work
        self.busy[cell] = done
        self.sim.recorder.busy_s += work
        self.sim.at(done, self._done, (cell, group, work))

    def _done(self, claim: tuple[int, s.GroupId, float]) -> None:
        cell, group, work = claim
        sim = self.sim
        self.trained_work += work
        del self.busy[cell]
        self.left[group] -= 1
        if self.queue and sim.state.cells[cell].role is s.Role.TRAINING:
            self._take(cell)
            sim.send(s.QueueLevel(sim.now, len(self.queue), max(self.queued_work, 0.0)))
        if self.left[group] == 0:
            del self.left[group]
            sim.send(s.GroupTrained(sim.now, group))

    def end(self, version: int) -> None:
        """All trained: gather, optimizer step, publish."""
        sim = self.sim
        satellites = sum(c.role is s.Role.TRAINING for c in sim.state.cells[1:])
        seconds = sim.costs.step_s + satellites * sim.costs.gather_s
        if self.queue or self.left or self.busy or len(sim.state.members) != sim.config.groups_per_step:
            raise SchedulerError(f"step {version} ended before all of its micro-steps: {sim.state}")
        sim.recorder.end(sim.now, [self.groups[g.id] for g in sim.state.members])
        for member in sim.state.members:
            del self.groups[member.id]
        sim.at(sim.now + seconds, self._publish, version + 1)

    def _publish(self, version: int) -> None:
        self.sim.recorder.publish(self.sim.now)
        self.sim.send(s.Published(self.sim.now, version))
