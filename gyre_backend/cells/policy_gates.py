"""Questions the rules ask of the state. Each is a pure predicate or number; none changes anything."""

from __future__ import annotations

from gyre_backend.cells.policy_config import PolicyConfig
from gyre_backend.cells.state import Phase, Role, SchedulerState


def round_trip(state: SchedulerState, config: PolicyConfig) -> float:
    """Cost of a move to training and back, s: measured, or the configured guess until both ways were seen."""
    there, back = state.move_seconds
    return there + back if there > 0 and back > 0 else config.round_trip_s


def backlog_gate(state: SchedulerState, config: PolicyConfig) -> float:
    """b, s."""
    return config.backlog_trips * round_trip(state, config) if config.backlog_s is None else config.backlog_s


def starve_gate(state: SchedulerState, config: PolicyConfig) -> float:
    """s, s."""
    return config.starve_trips * round_trip(state, config) if config.starve_s is None else config.starve_s


def step_is_full(state: SchedulerState, config: PolicyConfig) -> bool:
    """The open or next step has, or could have, all its groups: training is what everything waits for."""
    return len(state.members) + state.fits >= config.groups_per_step


def pressure(state: SchedulerState, config: PolicyConfig) -> float:
    """Training work that could be done now or right after the open step, cell-seconds.

    What is ready counts unless an open step has room and still doesn't take it (it is reserved for older
    groups).
    """
    if state.phase is Phase.OPEN and len(state.members) < config.groups_per_step:
        return state.queued_work
    return state.queued_work + state.ready_work if state.fits or state.phase is not Phase.IDLE else 0.0


def enough_ready(state: SchedulerState, config: PolicyConfig) -> bool:
    """The readiness of the core: phi * mu * B groups, or all the burst still needs."""
    if state.phase is Phase.OPEN and step_is_full(state, config):
        return True  # nothing more will come: the step can only be finished
    # A step with reserved places takes only `fits`; otherwise later steps of the burst take what this one has
    # no room for.
    room = config.groups_per_step - len(state.members)
    ready = state.fits if state.fits < min(room, len(state.ready)) else len(state.ready)
    have = ready + len(state.members) - len(state.trained)
    missing = state.burst_left * config.groups_per_step - len(state.trained)
    return have >= max(1, min(config.ready_needed, missing))


def time_to_full(state: SchedulerState, config: PolicyConfig) -> float:
    """Expected time until the open or next step's last group is ready, s.

    Two estimates, the later counts: the groups still missing arrive at the recent rate, and the batches in
    flight that fall due in this step take as long from their dispatch as earlier batches did. 0 when nothing
    is missing or nothing is known yet.
    """
    missing = config.groups_per_step - len(state.members) - state.fits
    if missing <= 0:
        return 0.0
    rest = missing * state.group_wait
    # With no staleness budget nothing falls due, but a step can't fill without the oldest when all in flight
    # are needed.
    due = state.version - config.max_staleness if config.max_staleness is not None else -1
    needed = state.num_inflight <= missing
    for version, sent in state.sent_at:
        if version <= due or needed:
            rest = max(rest, sent + state.span - state.now)
    return rest


def wants(state: SchedulerState, mover: int, config: PolicyConfig) -> bool:
    """Every gate but the waterlevel lets `mover` go to training."""
    if mover == 0:
        if not enough_ready(state, config):
            return False
        held = state.ready_since is not None and state.now >= state.ready_since + config.hold_s
        return held or state.waterlevel == 0  # with nothing running there is nothing to hold out for
    gate = backlog_gate(state, config)
    if gate == 0 and not config.look_ahead:
        return True
    if state.phase is not Phase.OPEN:
        return False
    work = pressure(state, config)
    if config.look_ahead and work < state.num_training * time_to_full(state, config):
        return False
    return work >= gate * (state.num_training + 1)


def level_allows(state: SchedulerState, mover: int, config: PolicyConfig) -> bool:
    """w <= C_R - C_e; the last rollout slots go only when nothing is left to roll out for the step."""
    after = state.capacity - state.cells[mover].slots
    return state.waterlevel <= after and (after > 0 or step_is_full(state, config))


def too_many_train(state: SchedulerState, config: PolicyConfig) -> bool:
    """Look-ahead, the way back: one training cell fewer would still be done before the step's last group is
    ready.

    The wait must be worth two round trips, or the cell would only come and go.
    """
    rest = time_to_full(state, config)
    if rest <= 2 * round_trip(state, config):
        return False
    if state.num_training == 1:
        return not enough_ready(state, config)
    return pressure(state, config) < (state.num_training - 1) * rest


def core_stays(state: SchedulerState, config: PolicyConfig) -> bool:
    """The core, idle, is needed again too soon to be worth `stay_trips` round trips; somebody else serves what is
    unfinished."""
    if not config.stay_trips or state.waterlevel == 0 or not state.capacity:
        return False
    return time_to_full(state, config) <= config.stay_trips * round_trip(state, config)


def switch_threshold(config: PolicyConfig) -> int:
    """Step switch: groups that must be ready before the pool is reclaimed (verl's clamp)."""
    return min(max(round(config.switch_ratio * config.groups_per_step), 1), config.groups_per_step)


def lends(state: SchedulerState, config: PolicyConfig) -> bool:
    """Step switch, between steps: lend the pool to rollout if groups are missing and the wait outweighs a
    round trip.

    verl's rule: benefit = missing * wait per sample * (1 - 1/scale), scale = (pool + standalone) /
    standalone; an unknown benefit or cost counts as "lend".
    """
    if config.moves != "pool" or state.phase is not Phase.IDLE:
        return False
    missing = switch_threshold(config) - state.fits
    if missing <= 0:
        return False
    pool = sum(c.slots for c in state.cells[: config.train_cells] if c.role is not Role.LOST)
    staying = state.standalone + sum(c.slots for c in state.cells[config.train_cells :] if c.role is Role.ROLLOUT)
    if state.group_wait == 0 or staying == 0 or 0 in state.move_seconds:
        return True
    return missing * state.group_wait * (pool / (pool + staying)) > sum(state.move_seconds)


def quiet_above(state: SchedulerState, config: PolicyConfig) -> int:
    """The highest w at which an execution's end could make the policy act, nothing else changing.

    Most events are such ends, and most of them change nothing: this number lets `decide` see that at once.
    Time is left out: `decide` evaluates in full once a `WakeAt` is due.
    """
    if config.moves != "serial" or state.num_moving or state.mover < 0 or not wants(state, state.mover, config):
        return 0  # at w = 0 several rules look at the idle rollout side
    return max(state.capacity - state.cells[state.mover].slots, 0)
