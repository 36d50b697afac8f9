"""The scheduler: a pure function from (state, event) to (state, actions). No clock, no I/O, no randomness.

The service and the simulator drive this same function. `decide` is total: an event that is impossible in the
state it arrives in (a duplicate, late news of a lost cell) changes nothing but `state.ignored`.

One call runs: take the event in, dispatch what a burst's start is owed, then steps (end, begin, assign), then
moves, then the timers. Dispatch comes first because whether cells may train depends on the executions about
to be sent.
"""

from __future__ import annotations

from msgspec.structs import replace

from gyre_backend.cells import policy_moves, policy_steps
from gyre_backend.cells.policy_config import PRESETS, PolicyConfig, from_mapping, preset
from gyre_backend.cells.policy_events import absorb
from gyre_backend.cells.policy_gates import quiet_above
from gyre_backend.cells.state import (
    Action,
    CellBack,
    CellLost,
    Event,
    ExecutionFinished,
    ExecutionStarted,
    GroupDropped,
    GroupReady,
    GroupTrained,
    MoveDone,
    Published,
    QueueLevel,
    SchedulerState,
    Tick,
)

__all__ = ["PRESETS", "PolicyConfig", "decide", "from_mapping", "preset"]


_EXECUTIONS = frozenset({ExecutionStarted, ExecutionFinished})
# Only these can change which steps may end, begin or take groups; the rest are most of the events.
_CHANGES_READY = frozenset({Tick, GroupReady, GroupDropped, Published, CellLost})
_CHANGES_STEPS = _CHANGES_READY | {GroupTrained, MoveDone, CellBack}


def decide(state: SchedulerState, event: Event, config: PolicyConfig) -> tuple[SchedulerState, list[Action]]:
    """The state after `event`, and what to do now, in order."""
    kind = type(event)
    queued = state.queued_micro_steps
    actions: list[Action] = []
    state = absorb(state, event, config, actions)
    if kind in _EXECUTIONS:
        quiet = state.dispatched - state.finished > state.quiet_above
        if quiet and (state.wake_at is None or state.now < state.wake_at):
            return state, actions
    elif kind is QueueLevel and 0 < state.queued_micro_steps <= queued:
        return state, actions  # the queue is being worked off: `GroupTrained` comes soon enough to look again
    state = policy_steps.dispatch(state, config, actions)
    if kind in _CHANGES_STEPS:
        state = policy_steps.advance(state, config, actions, recount=kind in _CHANGES_READY)
    releasing = state.releasing
    state = policy_moves.move(state, config, actions)
    if releasing and not state.releasing:
        # The core may have just been told to stay for the next burst: its first step can begin at once.
        state = policy_steps.advance(state, config, actions, recount=False)
    state = policy_moves.set_timer(state, config, actions)
    level = quiet_above(state, config)
    return (state if level == state.quiet_above else replace(state, quiet_above=level)), actions
