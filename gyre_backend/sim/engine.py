"""The simulator: the production policy on a simulated clock.

One heap for what happens at a known time (moves, micro-steps, publishing, wake-ups), one for executions
ordered by the *virtual* time at which they finish: all running executions share one speed, so a change of
load or cells rescales every finish time at once and costs nothing. Time limits are a queue, since every
execution has the same one.

The router is taken to balance perfectly: the rollout cells and the standalone pool serve one pool of
executions. An execution waits (its clock not running) until a slot is free; one whose cell leaves is sent
elsewhere and loses `reroute_s`; if no slot is free it pauses, with its clock running.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from gyre_backend.cells import state as s
from gyre_backend.cells.policy import PolicyConfig, decide
from gyre_backend.errors import SchedulerError
from gyre_backend.sim.costs import Costs
from gyre_backend.sim.result import Recorder, SimResult
from gyre_backend.sim.training import Training
from gyre_backend.sim.workload import Sample, Workload

_INF = math.inf


class Execution:
    """One running, waiting or paused execution."""

    __slots__ = ("at", "done", "group", "left", "lost", "running", "sample", "started")

    def __init__(self, group: SimGroup, sample: Sample) -> None:
        self.group = group
        self.sample = sample
        self.left = sample.virtual_s
        """Virtual seconds to go, as of when it last started to run."""
        self.at = _INF
        """Virtual clock at which it finishes, while running."""
        self.lost = 0.0
        """Virtual seconds lost to rerouting and not yet added to `at`."""
        self.started = -1.0
        self.running = False
        self.done = False


class SimGroup:
    """A dispatched group."""

    __slots__ = ("id", "left", "version", "virtual_s", "work")

    def __init__(self, index: int, version: int, left: int) -> None:
        self.id = index
        self.version = version
        self.left = left
        self.virtual_s = 0.0
        self.work = 0.0


class Simulator:
    """One run. `run(steps)` may be called again to go on.

    Args:
        config: the scheduler.
        workload: where executions come from.
        num_cells: K.
        slots: C_e.
        standalone: slots of the standalone pool.
        timeout_s: T, wall-clock limit of an execution from its start; inf = none.
        seed: seed of the workload; equal seeds give equal groups under every scheduler.
    """

    def __init__(
        self,
        config: PolicyConfig,
        workload: Workload,
        *,
        num_cells: int,
        slots: int,
        standalone: int = 0,
        timeout_s: float = _INF,
        costs: Costs | None = None,
        seed: int = 0,
    ) -> None:
        config.check_cells(num_cells, standalone)
        self.config = config
        self.costs = costs or Costs()
        self.workload = workload
        self.slots = slots
        self.timeout_s = timeout_s
        self.rng = random.Random(seed)
        self.state = s.initial(num_cells, slots, standalone=standalone)
        self.now = 0.0
        self.events = 0
        self.virtual = 0.0
        self.speed = 0.0
        self.speeds: dict[tuple[int, int], float] = {}
        self.served_s = 0.0
        """Virtual seconds served to all executions together: the rollout work done, whatever became of it."""
        self.touched = 0.0
        """When `virtual` was last brought up to date."""
        self.running: dict[Execution, None] = {}
        self.paused: deque[Execution] = deque()
        self.waiting: deque[Execution] = deque()
        self.finishes: list[tuple[float, int, Execution]] = []
        self.limits: deque[tuple[float, Execution]] = deque()
        self.heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self.order = 0
        self.groups = 0
        self.training = Training(self)
        self.recorder = Recorder(num_cells, standalone, slots)
        self._begun = False

    # ------------------------------------------------------------------------------------------ the clock

    def at(self, time: float, call: Callable[..., None], argument: Any = None) -> None:
        """Call `call(argument)` at `time`."""
        self.order += 1
        heappush(self.heap, (time, self.order, call, argument))

    def run(self, steps: int, max_events: int = 50_000_000) -> SimResult:
        """Until `steps` optimizer steps are published.

        Raises:
            SchedulerError: the policy let the run die out, or `max_events` were not enough.
        """
        if not self._begun:
            self._begun = True
            self.send(s.Tick(0.0))
        stop = self.events + max_events
        recorder = self.recorder
        while recorder.published < steps:
            if self.events >= stop:
                raise SchedulerError(f"{recorder.published} of {steps} steps after {max_events} events")
            self._next()
        return recorder.result(self)

    def _next(self) -> None:
        """The earliest of: an execution finishes, one reaches its limit, something scheduled happens."""
        finishes, limits, heap = self.finishes, self.limits, self.heap
        while finishes and finishes[0][2].at != finishes[0][0]:
            heappop(finishes)  # paused, rerouted or timed out since
        while limits and limits[0][1].done:
            limits.popleft()
        at = self.touched + (finishes[0][0] - self.virtual) / self.speed if finishes and self.speed > 0 else _INF
        limit = limits[0][0] if limits else _INF
        scheduled = heap[0][0] if heap else _INF
        time = at if at <= limit else limit
        if scheduled < time:
            time = scheduled
        if time == _INF:
            raise SchedulerError(f"nothing left to happen after {self.recorder.published} steps: {self.state}")
        self.events += 1
        if time > self.now:
            self.now = time
        if at <= limit and at <= scheduled:
            self._finish_next()
        elif limit <= scheduled:
            self._end(limits.popleft()[1], timed_out=True)
        else:
            _, _, call, argument = heappop(heap)
            call(argument)

    def _sync(self) -> None:
        """Bring the virtual clock to now."""
        passed = self.speed * (self.now - self.touched)
        self.virtual += passed
        self.served_s += passed * len(self.running)
        self.touched = self.now

    def _set_speed(self) -> None:
        """After `_sync`, when the load or the capacity has changed."""
        running = len(self.running)
        capacity = self.state.capacity
        key = (running, capacity)
        speed = self.speeds.get(key)
        if speed is None:
            speed = self.costs.speed(running * self.slots / capacity) if running and capacity else 0.0
            self.speeds[key] = speed
        self.speed = speed

    # ---------------------------------------------------------------------------------------- executions

    def _finish_next(self) -> None:
        at, _, execution = heappop(self.finishes)
        if execution.lost:
            execution.at = at + execution.lost
            execution.lost = 0.0
            self.order += 1
            heappush(self.finishes, (execution.at, self.order, execution))
            return
        self._end(execution, timed_out=False)

    def _end(self, execution: Execution, timed_out: bool) -> None:
        """Sealed: finished, or cut at its limit with what it has (partial scoring)."""
        now = self.now
        passed = self.speed * (now - self.touched)  # `_sync`, spelled out: this is the hot path
        self.virtual += passed
        self.served_s += passed * len(self.running)
        self.touched = now
        group, sample = execution.group, execution.sample
        done_s = full_s = sample.virtual_s
        if execution.running:
            if timed_out:
                done_s -= max(execution.at + execution.lost - self.virtual, 0.0)
            del self.running[execution]
        else:
            done_s -= execution.left
            self.paused.remove(execution)
        execution.done = True
        execution.running = False
        execution.at = _INF
        if done_s < 0.0:
            done_s = 0.0  # work done again after a reroute may exceed what was done
        group.virtual_s += done_s
        tokens = sample.tokens * done_s / max(full_s, 1e-9) if sample.tokens else 0.0
        group.work += self.costs.train_seconds(done_s, tokens)
        self.recorder.execution(done_s, timed_out)
        group.left -= 1
        if self.paused or self.waiting:
            self._fill()
        else:
            self._set_speed()
        self.send(s.ExecutionFinished(now))
        if group.left == 0:
            self.training.groups[group.id] = group
            self.send(s.GroupReady(now, group.id, group.version, group.work))

    def _fill(self) -> None:
        """Put paused, then waiting executions on free slots."""
        paused, waiting, running = self.paused, self.waiting, self.running
        free = self.state.capacity - len(running)
        started = 0
        limited = self.timeout_s < _INF
        while free > 0 and (paused or waiting):
            if paused:
                execution = paused.popleft()
            else:
                execution = waiting.popleft()
                execution.started = self.now
                started += 1
                if limited:
                    self.limits.append((self.now + self.timeout_s, execution))
            execution.running = True
            execution.at = at = self.virtual + execution.left
            self.order += 1
            heappush(self.finishes, (at, self.order, execution))
            running[execution] = None
            free -= 1
        self._set_speed()
        if started:
            self.send(s.ExecutionStarted(self.now, started))

    def _shrink(self, cells_before: int) -> None:
        """A cell left: its executions move and lose time; those that find no slot pause, youngest first."""
        moved = list(self.running)[:: max(cells_before, 1)]
        for execution in moved:
            execution.lost += self.costs.reroute_s
        self.recorder.reroutes += len(moved)
        excess = len(self.running) - self.state.capacity
        while excess > 0:
            execution, _ = self.running.popitem()
            execution.running = False
            execution.left = execution.at - self.virtual + execution.lost
            execution.lost = 0.0
            execution.at = _INF
            self.paused.appendleft(execution)
            excess -= 1
        self._set_speed()

    # -------------------------------------------------------------------------------------------- policy

    def send(self, event: s.Event) -> None:
        """Tell the policy, and do what it asks."""
        self.events += 1
        self.state, actions = decide(self.state, event, self.config)
        if actions:
            for action in actions:
                _ACTIONS[type(action)](self, action)

    def _dispatch(self, action: s.Dispatch) -> None:
        for _ in range(action.groups):
            group = SimGroup(self.groups, action.version, self.config.group_size)
            self.groups += 1
            for sample in self.workload.group(self.rng, self.config.group_size):
                self.waiting.append(Execution(group, sample))
        # Slots are filled once the policy has been heard out: it must not be called from within itself.
        self.at(self.now, self._refill)

    def _refill(self, _: None) -> None:
        self._sync()
        self._fill()

    def _to_training(self, action: s.MoveToTraining) -> None:
        self._sync()
        if self.config.moves == "serial" and self.state.waterlevel > self.state.capacity:
            raise SchedulerError(f"cell {action.cell} left for training with w > C_R - C_e: {self.state}")
        cells = self.state.capacity // self.slots + 1
        self._shrink(cells)
        seconds = self.costs.to_training_s + (self.costs.pull_s if action.cell else 0.0)
        self.recorder.role(self.now, action.cell, s.Role.TO_TRAINING)
        self.at(self.now + seconds, self._arrived, action.cell)

    def _to_rollout(self, action: s.MoveToRollout) -> None:
        start = max(self.now, self.training.busy_until(action.cell))
        self.recorder.role(start, action.cell, s.Role.TO_ROLLOUT)
        self.at(start + self.costs.to_rollout_s, self._arrived, action.cell)

    def _arrived(self, cell: int) -> None:
        self._sync()
        to_training = self.state.cells[cell].role is s.Role.TO_TRAINING
        self.recorder.role(self.now, cell, s.Role.TRAINING if to_training else s.Role.ROLLOUT)
        self.send(s.MoveDone(self.now, cell))
        if to_training:
            self.training.claim()
        else:
            self._fill()

    def _wake(self, action: s.WakeAt) -> None:
        self.at(action.time, self._tick)

    def _tick(self, _: None) -> None:
        self.send(s.Tick(self.now))

    def _begin(self, action: s.BeginStep) -> None:
        self.training.begin(action.version)

    def _assign(self, action: s.Assign) -> None:
        self.training.assign(action.groups)

    def _end_step(self, action: s.EndStep) -> None:
        self.training.end(action.version)


_ACTIONS: dict[type[s.Action], Callable[[Simulator, Any], None]] = {
    s.Dispatch: Simulator._dispatch,
    s.MoveToTraining: Simulator._to_training,
    s.MoveToRollout: Simulator._to_rollout,
    s.WakeAt: Simulator._wake,
    s.BeginStep: Simulator._begin,
    s.Assign: Simulator._assign,
    s.EndStep: Simulator._end_step,
}
