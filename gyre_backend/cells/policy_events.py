"""How each event changes the state, before any rule is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gyre_backend.cells import state as s
from gyre_backend.cells.policy_config import PolicyConfig
from gyre_backend.cells.state import Action, CellState, Event, Group, Phase, Role, SchedulerState


def absorb(state: SchedulerState, event: Event, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """Apply `event`. Only losing the core acts at once (`AbortStep`)."""
    now = event.now if event.now > state.now else state.now
    return _HANDLERS[type(event)](state, event, now, config, actions)


def set_cell(state: SchedulerState, index: int, role: Role) -> SchedulerState:
    """The cell takes `role` now; C_R and the other sums over cells follow."""
    cells = list(state.cells)
    cells[index] = CellState(role, cells[index].slots, state.now)
    capacity, training, moving, mover, last = state.standalone, 0, 0, -1, -1
    for number, cell in enumerate(cells):
        if cell.role is Role.ROLLOUT:
            capacity += cell.slots
            mover = number if mover < 0 else mover
        elif cell.role is Role.TRAINING:
            training, last = training + 1, number
        elif cell.role is not Role.LOST:
            moving += 1
    if mover > 0 and cells[0].role is not Role.TRAINING:
        mover = -1
    return replace(
        state,
        cells=tuple(cells),
        capacity=capacity,
        num_training=training,
        num_moving=moving,
        mover=mover,
        last_training=last,
    )


def _ignored(state: SchedulerState, now: float) -> SchedulerState:
    return replace(state, now=now, ignored=state.ignored + 1)


def _tick(state: SchedulerState, _: s.Tick, now: float, *__: Any) -> SchedulerState:
    due = state.wake_at is not None and state.wake_at <= now
    return replace(state, now=now, wake_at=None if due else state.wake_at)


def _started(state: SchedulerState, event: s.ExecutionStarted, now: float, *_: Any) -> SchedulerState:
    started = state.started + event.count
    if event.count < 0 or started > state.dispatched:
        return _ignored(state, now)
    return replace(state, now=now, started=started)


def _finished(state: SchedulerState, event: s.ExecutionFinished, now: float, *_: Any) -> SchedulerState:
    finished = state.finished + event.count
    if event.count < 0 or finished > state.dispatched:
        return _ignored(state, now)
    # An execution may end without ever having started (its sandbox failed): p never lags behind f.
    if state.started >= finished:
        return replace(state, now=now, finished=finished)
    return replace(state, now=now, finished=finished, started=finished)


def _landed(state: SchedulerState, version: int) -> tuple[tuple[int, int], ...] | None:
    """`inflight` with one group of `version` fewer, or None if there is none."""
    if not any(v == version for v, _ in state.inflight):
        return None
    return tuple((v, n - (v == version)) for v, n in state.inflight if n - (v == version) > 0)


def _spans(state: SchedulerState, inflight: tuple[tuple[int, int], ...], now: float) -> dict[str, Any]:
    """What the end of a version's last group teaches about spans; nothing if it wasn't the last."""
    if len(inflight) == len(state.inflight):
        return {}
    alive = {version for version, _ in inflight}
    span = state.span
    for version, sent in state.sent_at:
        if version not in alive:
            span = now - sent if span == 0 else (span + now - sent) / 2
    return {"span": span, "sent_at": tuple(e for e in state.sent_at if e[0] in alive)}


def _group_ready(state: SchedulerState, event: s.GroupReady, now: float, *_: Any) -> SchedulerState:
    inflight = _landed(state, event.version)
    known = any(g.id == event.group for g in state.ready) or any(g.id == event.group for g in state.members)
    if inflight is None or known or not 0 <= event.work < float("inf"):
        return _ignored(state, now)
    ready = state.ready
    at = len(ready)
    while at and ready[at - 1].version > event.version:
        at -= 1
    wait = state.group_wait
    if state.last_ready is not None:
        # Weight 1/8 follows a changing workload within a step and still smooths a whole group's worth of
        # noise.
        gap = now - state.last_ready
        wait = gap if wait == 0 else wait + (gap - wait) / 8
    return replace(
        state,
        now=now,
        inflight=inflight,
        num_inflight=state.num_inflight - 1,
        ready=(*ready[:at], Group(event.group, event.version, event.work), *ready[at:]),
        ready_work=state.ready_work + event.work,
        group_wait=wait,
        last_ready=now,
        **_spans(state, inflight, now),
    )


def _group_dropped(state: SchedulerState, event: s.GroupDropped, now: float, *_: Any) -> SchedulerState:
    inflight = _landed(state, event.version)
    if inflight is None:
        return _ignored(state, now)
    spans = _spans(state, inflight, now)
    return replace(state, now=now, inflight=inflight, num_inflight=state.num_inflight - 1, **spans)


def _queue_level(state: SchedulerState, event: s.QueueLevel, now: float, *_: Any) -> SchedulerState:
    if state.phase is not Phase.OPEN or event.micro_steps < 0 or not event.work >= 0:
        return _ignored(state, now)
    return replace(state, now=now, queued_micro_steps=event.micro_steps, queued_work=event.work)


def _group_trained(state: SchedulerState, event: s.GroupTrained, now: float, *_: Any) -> SchedulerState:
    if state.phase is not Phase.OPEN or event.group in state.trained or all(g.id != event.group for g in state.members):
        return _ignored(state, now)
    return replace(state, now=now, trained=state.trained | {event.group})


def _group_requeued(state: SchedulerState, event: s.GroupRequeued, now: float, *_: Any) -> SchedulerState:
    if state.phase is Phase.IDLE or event.group not in state.trained:
        return _ignored(state, now)
    return replace(state, now=now, trained=state.trained - {event.group}, phase=Phase.OPEN)


def _move_done(state: SchedulerState, event: s.MoveDone, now: float, *_: Any) -> SchedulerState:
    if not 0 <= event.cell < len(state.cells):
        return _ignored(state, now)
    cell = state.cells[event.cell]
    there, back = state.move_seconds
    took = max(now - cell.since, 1e-9)
    if cell.role is Role.TO_TRAINING:
        return set_cell(replace(state, now=now, move_seconds=(_lower(there, took), back)), event.cell, Role.TRAINING)
    if cell.role is Role.TO_ROLLOUT:
        return set_cell(replace(state, now=now, move_seconds=(there, _lower(back, took))), event.cell, Role.ROLLOUT)
    return _ignored(state, now)


def _lower(known: float, took: float) -> float:
    """The new estimate of a move: at once down, slowly up. A cell that is told to leave finishes its micro-step first, and
    that wait is no cost of moving."""
    return took if known == 0 else min(took, 1.25 * known)


def _published(
    state: SchedulerState, event: s.Published, now: float, config: PolicyConfig, _: list[Action]
) -> SchedulerState:
    if state.phase is not Phase.CLOSING or event.version != state.version + 1:
        return _ignored(state, now)
    over = state.burst_left <= 1
    return replace(
        state,
        now=now,
        version=event.version,
        phase=Phase.IDLE,
        members=(),
        trained=frozenset(),
        queued_micro_steps=0,
        queued_work=0.0,
        burst_left=config.burst_steps if over else state.burst_left - 1,
        refill=state.refill or over,
        releasing=state.releasing or (over and config.moves in ("serial", "barrier")),
    )


def _cell_lost(
    state: SchedulerState, event: s.CellLost, now: float, _: PolicyConfig, actions: list[Action]
) -> SchedulerState:
    if not 0 <= event.cell < len(state.cells) or state.cells[event.cell].role is Role.LOST:
        return _ignored(state, now)
    state = set_cell(replace(state, now=now), event.cell, Role.LOST)
    if event.cell != 0 or state.phase is Phase.IDLE:
        return state
    members = state.members
    actions.append(s.AbortStep(state.version, tuple(g.id for g in members)))
    return replace(
        state,
        phase=Phase.IDLE,
        members=(),
        trained=frozenset(),
        queued_micro_steps=0,
        queued_work=0.0,
        ready=tuple(sorted((*members, *state.ready), key=lambda g: g.version)),
        ready_work=state.ready_work + sum(g.work for g in members),
    )


def _cell_back(state: SchedulerState, event: s.CellBack, now: float, *_: Any) -> SchedulerState:
    if not 0 <= event.cell < len(state.cells) or state.cells[event.cell].role is not Role.LOST:
        return _ignored(state, now)
    return set_cell(replace(state, now=now), event.cell, Role.ROLLOUT)


_HANDLERS: dict[type[Event], Callable[..., SchedulerState]] = {
    s.Tick: _tick,
    s.ExecutionStarted: _started,
    s.ExecutionFinished: _finished,
    s.GroupReady: _group_ready,
    s.GroupDropped: _group_dropped,
    s.QueueLevel: _queue_level,
    s.GroupTrained: _group_trained,
    s.GroupRequeued: _group_requeued,
    s.MoveDone: _move_done,
    s.Published: _published,
    s.CellLost: _cell_lost,
    s.CellBack: _cell_back,
}
