"""The scheduler: a pure function from (state, event) to (state, actions). No clock, no I/O, no randomness.

The service and the simulator drive this same function. `decide` is total: an event that is impossible in the
state it arrives in (a duplicate, late news of a lost cell) changes nothing but `state.ignored`.

One call runs: take the event in, then steps (end, begin, assign), then a burst's dispatch, then moves, then
slot-wise dispatch, then the timers. Order matters once: moves come before slot-wise dispatch, so that a cell
that may leave leaves before the slots it needs empty are filled again.
"""

from __future__ import annotations

from gyre_backend.cells import policy_moves, policy_steps
from gyre_backend.cells.policy_config import PRESETS, PolicyConfig, from_mapping, preset
from gyre_backend.cells.policy_events import absorb
from gyre_backend.cells.state import (
    Action,
    CellBack,
    CellLost,
    Event,
    GroupDropped,
    GroupReady,
    GroupTrained,
    MoveDone,
    Published,
    SchedulerState,
    Tick,
)

__all__ = ["PRESETS", "PolicyConfig", "decide", "from_mapping", "preset"]


# Only these can change which steps may end, begin or take groups; the rest are most of the events.
_CHANGES_READY = frozenset({Tick, GroupReady, GroupDropped, GroupTrained, MoveDone, Published, CellLost, CellBack})


def decide(state: SchedulerState, event: Event, config: PolicyConfig) -> tuple[SchedulerState, list[Action]]:
    """The state after `event`, and what to do now, in order."""
    actions: list[Action] = []
    state = absorb(state, event, config, actions)
    if type(event) in _CHANGES_READY:
        state = policy_steps.advance(state, config, actions)
    if config.dispatch == "burst":
        state = policy_steps.dispatch_burst(state, config, actions)
        state = _move(state, config, actions)
    else:
        state = _move(state, config, actions)
        state = policy_steps.dispatch_slots(state, config, actions)
    return policy_moves.set_timer(state, config, actions), actions


def _move(state: SchedulerState, config: PolicyConfig, actions: list[Action]) -> SchedulerState:
    releasing = state.releasing
    state = policy_moves.move(state, config, actions)
    # The core may have just been told to stay for the next burst: its first step can begin at once.
    return policy_steps.advance(state, config, actions) if releasing and not state.releasing else state
