"""Rules for moving cells between rollout and training, and the timers they need."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from gyre_backend.cells import policy_gates as gates
from gyre_backend.cells.policy_config import PolicyConfig
from gyre_backend.cells.policy_events import set_cell
from gyre_backend.cells.state import (
    Action,
    MoveToRollout,
    MoveToTraining,
    Phase,
    Role,
    SchedulerState,
    WakeAt,
)


def move(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """Bring the hold and starvation clocks up to date, then order the moves that the rule of `config.moves`
    asks for."""
    state = _clocks(state, config)
    return _RULES[config.moves](state, config, actions)


def _go(state: SchedulerState, index: int, actions: list[Action]) -> SchedulerState:
    """Order the move of one cell away from the role it has."""
    if state.cells[index].role is Role.ROLLOUT:
        actions.append(MoveToTraining(index))
        return set_cell(state, index, Role.TO_TRAINING)
    actions.append(MoveToRollout(index))
    return set_cell(state, index, Role.TO_ROLLOUT)


def _clocks(state: SchedulerState, config: PolicyConfig) -> SchedulerState:
    ready = gates.enough_ready(state, config)
    if ready is (state.ready_since is None):
        state = replace(state, ready_since=state.now if ready else None)
    starved = _starved(state, config)
    if starved is (state.starved_since is None):
        state = replace(state, starved_since=state.now if starved else None)
    return state


def _starved(state: SchedulerState, config: PolicyConfig) -> bool:
    return state.num_training > 0 and state.queued_micro_steps == 0 and gates.pressure(state, config) == 0


# ------------------------------------------------------------------------------------------------ one by one


def _serial(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    if state.num_moving:
        return state
    if state.releasing:
        state = _release(state, config, actions)
        if state.releasing or state.num_moving:
            return state
    back = _returner(state, config)
    if back is not None:
        return _go(state, back, actions)
    mover = state.mover
    if mover < 0 or not gates.level_allows(state, mover, config) or not gates.wants(state, mover, config):
        return state
    return _go(state, mover, actions)


def _release(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """After a burst: satellites return, last first; the core stays if the next batch is ready and the rest
    covers w."""
    last = state.last_training if config.release_at_burst_end else -1
    if last < 0:
        return replace(state, releasing=False)
    stays = (
        last == 0 and gates.enough_ready(state, config) and state.waterlevel <= state.capacity and state.capacity > 0
    )
    if stays:
        return replace(state, releasing=False)
    return _go(state, last, actions)


def _returner(state: SchedulerState, config: PolicyConfig) -> int | None:
    """The training cell that should go back to rollout now."""
    last = state.last_training
    if last < 0:
        return None
    core_trains = state.cells[0].role is Role.TRAINING
    if last > 0 and not core_trains:
        return last  # without a core there is nothing to join
    may_leave = last > 0 or state.phase is Phase.IDLE  # in mid-step the core holds the gradients
    stranded = state.capacity == 0 and state.waterlevel > 0
    if stranded and may_leave:
        return last
    if last == 0 and state.phase is Phase.IDLE and gates.core_stays(state, config):
        return None
    waits = state.waterlevel > state.capacity
    if config.yield_to_rollout and waits and may_leave and not gates.step_is_full(state, config):
        return last
    if config.look_ahead and may_leave and state.phase is not Phase.CLOSING and gates.too_many_train(state, config):
        return last
    over = state.phase is Phase.CLOSING or (
        state.phase is Phase.OPEN and state.queued_micro_steps == 0 and gates.step_is_full(state, config)
    )
    if last > 0 and config.look_ahead and over:
        return last  # its gradient is asked for once; the optimizer steps without it, and rollout has it back sooner
    if state.starved_since is None:
        return None
    if last > 0:
        # Nothing to train, and executions that find no slots: waiting out s would help nobody.
        return last if waits or _waited(state, config) else None
    if state.phase is Phase.OPEN:
        return (
            0 if stranded else None
        )  # nobody else can serve: better to keep its gradients aside than to wait for ever
    idle = state.phase is Phase.IDLE
    return 0 if idle and (state.capacity == 0 or _waited(state, config)) else None


def _waited(state: SchedulerState, config: PolicyConfig) -> bool:
    return state.starved_since is not None and state.now >= state.starved_since + gates.starve_gate(state, config)


# ------------------------------------------------------------------------------------------- all at once


def _pool(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """verl's step switch: cells 0..n-1 together, between steps only."""
    pool = range(min(config.train_cells, len(state.cells)))
    roles = [state.cells[i].role for i in pool]
    if Role.TO_TRAINING in roles or Role.TO_ROLLOUT in roles:
        return state
    core = roles[0]
    back = core is not Role.TRAINING or gates.lends(state, config)
    if core is Role.LOST or (core is Role.TRAINING and back) or (core is Role.ROLLOUT and Role.TRAINING in roles):
        return _all(state, pool, Role.TRAINING, actions)
    if state.phase is Phase.IDLE and state.fits >= gates.switch_threshold(config):
        return _all(state, pool, Role.ROLLOUT, actions)
    return state


def _static(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """async: the training side is fixed; a cell that comes back after a failure rejoins its side."""
    return _all(state, range(min(config.train_cells, len(state.cells))), Role.ROLLOUT, actions)


def _barrier(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """colocate: everybody trains when nothing is unfinished and a step's groups are ready; everybody returns
    after the burst."""
    cells = range(len(state.cells))
    if state.num_moving:
        return state
    if state.num_training and state.phase is Phase.IDLE and (state.releasing or state.waterlevel > 0):
        return _all(replace(state, releasing=False), cells, Role.TRAINING, actions)
    if state.waterlevel == 0 and state.phase is Phase.IDLE and state.fits >= config.groups_per_step:
        return _all(replace(state, releasing=False), cells, Role.ROLLOUT, actions)
    return state


def _all(state: SchedulerState, indices: range, role: Role, actions: list[Action]) -> SchedulerState:
    for index in indices:
        if state.cells[index].role is role:
            state = _go(state, index, actions)
    return state


_RULES: dict[str, Callable[..., SchedulerState]] = {
    "serial": _serial,
    "pool": _pool,
    "static": _static,
    "barrier": _barrier,
}

# ----------------------------------------------------------------------------------------------------- timers


def set_timer(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    """Ask to be woken when the next hold or starvation time runs out."""
    if config.moves != "serial":
        return state
    due = float("inf")
    if state.ready_since is not None and state.cells[0].role is Role.ROLLOUT:
        due = _later(state.ready_since + config.hold_s, state.now, due)
    if state.starved_since is not None:
        due = _later(state.starved_since + gates.starve_gate(state, config), state.now, due)
    if due == float("inf") or (state.wake_at is not None and state.wake_at <= due):
        return state
    actions.append(WakeAt(due))
    return replace(state, wake_at=due)


def _later(time: float, now: float, due: float) -> float:
    return time if now < time < due else due
