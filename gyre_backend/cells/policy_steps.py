"""Rules for optimizer steps and for dispatch: which groups train when, and when new ones are sent."""

from __future__ import annotations

from msgspec.structs import replace

from gyre_backend.cells.policy_config import PolicyConfig
from gyre_backend.cells.policy_gates import core_stays, enough_ready, lends, step_is_full
from gyre_backend.cells.state import (
    Action,
    Assign,
    BeginStep,
    Dispatch,
    EndStep,
    Group,
    Phase,
    Role,
    SchedulerState,
)


def advance(state: SchedulerState, config: PolicyConfig, actions: list[Action], *, recount: bool) -> SchedulerState:
    """End the open step when all of it is trained; else begin one if the core trains; else assign what became
    ready."""
    if recount and (fits := len(assignable(state, config))) != state.fits:
        state = replace(state, fits=fits)
    if state.phase is Phase.CLOSING or state.cells[0].role is not Role.TRAINING:
        return state
    if state.phase is Phase.IDLE:
        if not state.fits or (state.releasing and config.release_at_burst_end):
            return state
        if not config.streaming and state.fits < config.groups_per_step:
            return state
        if _rollout_comes_first(state, config) or lends(state, config):
            return state
        actions.append(BeginStep(state.version))
        return _assign(replace(state, phase=Phase.OPEN), assignable(state, config), actions)
    if len(state.members) < config.groups_per_step:
        return _assign(state, assignable(state, config), actions) if state.fits else state
    if len(state.trained) == config.groups_per_step:
        actions.append(EndStep(state.version))
        return replace(state, phase=Phase.CLOSING, queued_micro_steps=0, queued_work=0.0)
    return state


def _assign(state: SchedulerState, groups: tuple[Group, ...], actions: list[Action]) -> SchedulerState:
    actions.append(Assign(state.version, tuple(g.id for g in groups)))
    taken = {g.id for g in groups}
    ready = tuple(g for g in state.ready if g.id not in taken)
    work = sum(g.work for g in groups)
    # Until the driver reports its queue, the assigned work is the best estimate of it.
    return replace(
        state,
        members=state.members + groups,
        ready=ready,
        ready_work=sum(g.work for g in ready),
        fits=0,
        queued_micro_steps=state.queued_micro_steps + len(groups),
        queued_work=state.queued_work + work,
    )


def assignable(state: SchedulerState, config: PolicyConfig) -> tuple[Group, ...]:
    """The ready groups that the next or open step may take now, oldest version first.

    With a staleness budget S this is earliest-deadline-first with reservations: a group dispatched at version
    u must be in step u + S at the latest. Of the groups not trained yet, let N_k be those due within k steps
    of this one; after this step at most k * B of them may remain, so N_k - k * B places of this step are
    theirs, ready or not. A younger group gets a place only beyond those.
    """
    room = config.groups_per_step - len(state.members)
    if room <= 0 or not state.ready:
        return ()
    if config.max_staleness is None:
        return state.ready[:room]
    oldest = state.version - config.max_staleness
    waiting = [0] * (config.max_staleness + 1)
    ready = waiting.copy()
    for version, count in state.inflight:
        waiting[max(version - oldest, 0)] += count
    for group in state.ready:
        ready[max(group.version - oldest, 0)] += 1
    taken = older = reserve = 0
    for due, count in enumerate(ready):  # `state.ready` is in this order too
        takes = min(count, room - taken - reserve)
        if takes < count:
            return state.ready[: taken + max(takes, 0)]
        taken += takes
        older += waiting[due]
        reserve = max(reserve, older - due * config.groups_per_step)
    return state.ready[:taken]


def _rollout_comes_first(state: SchedulerState, config: PolicyConfig) -> bool:
    """Don't begin a step that can't be filled soon while the core's slots are needed: it would pin the core
    to training."""
    if step_is_full(state, config):
        return False
    if state.capacity == 0 and state.waterlevel > 0:
        return True
    if core_stays(state, config):
        return False
    if config.yield_to_rollout and state.waterlevel > state.capacity:
        return True
    return config.look_ahead and not enough_ready(state, config) and state.waterlevel > 0


def dispatch(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """At a burst's start, refill to the limit; within it, only replace groups that were dropped and are
    needed."""
    needed = min(state.burst_left * config.groups_per_step, config.limit)
    target = needed
    if state.refill:
        target = config.limit
        if config.queue_limit is not None:
            slots = state.standalone + sum(cell.slots for cell in state.cells)
            enough = max(slots, config.groups_per_step * config.group_size)
            free = max(int(config.queue_limit * enough) - state.waterlevel, 0)
            useful = state.outstanding + free // config.group_size
            target = max(needed, min(target, useful))
        state = replace(state, refill=False)
    groups = target - state.outstanding
    if groups <= 0:
        return state
    actions.append(Dispatch(groups, state.version))
    inflight, sent_at = state.inflight, state.sent_at
    if inflight and inflight[-1][0] == state.version:
        inflight = (*inflight[:-1], (state.version, inflight[-1][1] + groups))
    else:
        inflight = (*inflight, (state.version, groups))
        sent_at = (*sent_at, (state.version, state.now))
    return replace(
        state,
        dispatched=state.dispatched + groups * config.group_size,
        inflight=inflight,
        sent_at=sent_at,
        num_inflight=state.num_inflight + groups,
    )
