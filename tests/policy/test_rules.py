"""Single rules, on states made by hand."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from gyre_backend.cells import state as s
from gyre_backend.cells.policy import PRESETS, PolicyConfig, decide, from_mapping, preset
from gyre_backend.cells.policy_steps import assignable
from gyre_backend.cells.state import Group, Role, SchedulerState, initial
from gyre_sdk.errors import ConfigError


def feed(state: SchedulerState, config: PolicyConfig, *events: s.Event) -> tuple[SchedulerState, list[s.Action]]:
    actions: list[s.Action] = []
    for event in events:
        state, now = decide(state, event, config)
        actions += now
    return state, actions


def ready(now: float, first: int, count: int, version: int = 0, work: float = 100.0) -> list[s.Event]:
    """`count` whole groups of one execution each end."""
    out: list[s.Event] = []
    for group in range(first, first + count):
        out += [s.ExecutionFinished(now), s.GroupReady(now, group, version, work)]
    return out


def test_paper_moves_core_then_satellites_one_by_one_as_the_waterlevel_falls() -> None:
    config = preset("paper", groups_per_step=8, group_size=1, hold_s=0.0, readiness=0.25)
    state, actions = feed(initial(4, 2), config, s.Tick(0.0))
    assert actions == [s.Dispatch(8, 0)]
    state, actions = feed(state, config, *ready(1.0, 0, 1))
    assert actions == []  # w = 7 > C_R - C_e = 6, and too few ready
    state, actions = feed(state, config, *ready(2.0, 1, 1))
    assert s.MoveToTraining(0) in actions  # w = 6
    state, actions = feed(state, config, s.MoveDone(3.0, 0))
    assert actions[:2] == [s.BeginStep(0), s.Assign(0, (0, 1))]
    state, actions = feed(state, config, *ready(4.0, 2, 1))
    assert s.MoveToTraining(1) not in actions  # w = 5 > 4
    state, actions = feed(state, config, *ready(5.0, 3, 1))
    assert actions == [s.MoveToTraining(1), s.Assign(0, (3,))] or s.MoveToTraining(1) in actions


def test_the_core_waits_until_readiness_has_been_held() -> None:
    config = preset("paper", groups_per_step=4, group_size=1, hold_s=60.0, readiness=0.5)
    state, _ = feed(initial(4, 2), config, s.Tick(0.0))
    state, actions = feed(state, config, *ready(10.0, 0, 2))
    assert actions == [s.WakeAt(70.0)]
    state, actions = feed(state, config, s.Tick(70.0))
    assert s.MoveToTraining(0) in actions


def test_look_ahead_joins_only_when_the_work_would_not_be_done_in_time() -> None:
    config = preset("gyre", groups_per_step=4, group_size=1, backlog_s=1.0)
    base = replace(
        initial(3, 4), cells=(s.CellState(Role.TRAINING, 4), s.CellState(Role.ROLLOUT, 4), s.CellState(Role.ROLLOUT, 4))
    )
    base = replace(base, capacity=8, num_training=1, mover=1, dispatched=8, finished=5, started=8, refill=False)
    base = replace(
        base,
        phase=s.Phase.OPEN,
        members=(Group(0, 0, 50.0), Group(1, 0, 50.0), Group(2, 0, 50.0)),
        inflight=((0, 1),),
        num_inflight=1,
        sent_at=((0, 0.0),),
        span=1000.0,
        now=900.0,
    )
    early = replace(base, queued_micro_steps=0)
    _, actions = feed(early, config, s.QueueLevel(900.0, 3, 90.0))
    assert s.MoveToTraining(1) not in actions  # 90 s of work, 100 s to go
    _, actions = feed(early, config, s.QueueLevel(900.0, 3, 150.0))
    assert s.MoveToTraining(1) in actions


def in_training(*cells: Role, **fields: object) -> SchedulerState:
    """Cells of four slots in these roles, and the sums over them."""
    state = replace(
        initial(len(cells), 4),
        cells=tuple(s.CellState(role, 4) for role in cells),
        capacity=4 * cells.count(Role.ROLLOUT),
        num_training=cells.count(Role.TRAINING),
        mover=cells.index(Role.ROLLOUT),
        last_training=max(i for i, role in enumerate(cells) if role is Role.TRAINING),
        refill=False,
    )
    return replace(state, **fields)


def test_satellites_leave_as_soon_as_nothing_is_left_to_lease_in_a_full_step() -> None:
    config = preset("gyre", groups_per_step=2, group_size=1, max_staleness=1)
    state = in_training(
        Role.TRAINING, Role.TRAINING, Role.ROLLOUT,
        phase=s.Phase.OPEN, members=(Group(0, 0, 50.0), Group(1, 0, 50.0)), queued_micro_steps=1, queued_work=25.0,
        dispatched=4, started=4, finished=2, inflight=((0, 2),), num_inflight=2, sent_at=((0, 0.0),), now=100.0,
    )  # fmt: skip
    _, actions = feed(state, config, s.GroupTrained(100.0, 0))
    assert s.MoveToRollout(1) not in actions  # one micro-step is still to be had
    _, actions = feed(state, config, s.QueueLevel(100.0, 0, 0.0))
    assert s.MoveToRollout(1) in actions


@pytest.mark.parametrize(("span", "stays"), [(105.0, True), (1000.0, False)])
def test_the_core_stays_in_training_when_it_is_needed_again_within_five_round_trips(span: float, stays: bool) -> None:
    config = preset("gyre", groups_per_step=2, group_size=2, max_staleness=1, round_trip_s=12.0)
    state = in_training(
        Role.TRAINING, Role.ROLLOUT,
        dispatched=8, started=4, inflight=((0, 2), (1, 2)), num_inflight=4, sent_at=((0, 50.0), (1, 99.0)),
        version=1, span=span, now=100.0,
    )  # fmt: skip
    _, actions = feed(state, config, s.Tick(100.0))  # w = 8 > C_R = 4: executions wait for slots
    assert (s.MoveToRollout(0) not in actions) is stays


def test_waiting_for_a_micro_step_is_no_cost_of_moving() -> None:
    config = preset("gyre", groups_per_step=2, group_size=1)
    state = in_training(Role.TRAINING, Role.ROLLOUT, move_seconds=(8.0, 4.0))
    state, _ = feed(
        replace(state, cells=(state.cells[0], s.CellState(Role.TO_ROLLOUT, 4, 0.0))), config, s.MoveDone(300.0, 1)
    )
    assert state.move_seconds == (8.0, 5.0)
    state, _ = feed(
        replace(state, cells=(state.cells[0], s.CellState(Role.TO_ROLLOUT, 4, 300.0))), config, s.MoveDone(303.0, 1)
    )
    assert state.move_seconds == (8.0, 3.0)


@pytest.mark.parametrize(
    ("versions", "inflight", "expected"),
    [
        ((0, 0), ((0, 2),), 2),  # all due now: everything ready goes
        ((1, 1), ((0, 2),), 0),  # both places are reserved for the two that are due
        ((1, 1), ((0, 1),), 1),
        ((1, 1, 1), (), 2),
        ((1,), ((1, 3),), 1),  # nothing is due yet
    ],
)
def test_places_are_reserved_for_groups_that_fall_due(
    versions: tuple[int, ...], inflight: tuple[tuple[int, int], ...], expected: int
) -> None:
    config = preset("gyre", groups_per_step=2, group_size=1, max_staleness=1)
    groups = tuple(Group(i, v, 1.0) for i, v in enumerate(versions))
    state = replace(initial(2, 4), version=1, ready=groups, inflight=inflight, num_inflight=sum(n for _, n in inflight))
    assert len(assignable(state, config)) == expected


def test_step_switch_moves_its_pool_together_at_the_ratio() -> None:
    config = preset("step-switch", groups_per_step=5, group_size=1, train_cells=2, switch_ratio=0.6)
    state, _ = feed(initial(4, 2), config, s.Tick(0.0))
    state, actions = feed(state, config, *ready(1.0, 0, 2))
    assert actions == []
    state, actions = feed(state, config, *ready(2.0, 2, 1))
    assert actions == [s.MoveToTraining(0), s.MoveToTraining(1)]


def test_async_holds_its_split_and_a_lost_cell_rejoins_its_side() -> None:
    config = preset("async", groups_per_step=2, group_size=1, train_cells=1)
    state, actions = feed(initial(3, 2), config, s.Tick(0.0), s.MoveDone(1.0, 0), s.CellLost(2.0, 0))
    assert s.MoveToTraining(0) in actions
    _, actions = feed(state, config, s.CellBack(3.0, 0))
    assert actions == [s.MoveToTraining(0)]


def test_losing_the_core_in_mid_step_gives_its_groups_back() -> None:
    config = preset("paper", groups_per_step=2, group_size=1, hold_s=0.0)
    state, _ = feed(initial(2, 2), config, s.Tick(0.0), *ready(1.0, 0, 1), s.MoveDone(2.0, 0))
    assert [g.id for g in state.members] == [0]
    state, actions = feed(state, config, s.CellLost(3.0, 0))
    assert actions[0] == s.AbortStep(0, (0,))
    assert [g.id for g in state.ready] == [0]


@pytest.mark.parametrize(
    "event",
    [
        s.MoveDone(1.0, 0),
        s.MoveDone(1.0, 99),
        s.CellBack(1.0, 0),
        s.CellLost(1.0, -1),
        s.Published(1.0, 1),
        s.GroupTrained(1.0, "x"),
        s.GroupRequeued(1.0, "x"),
        s.GroupDropped(1.0, 7),
        s.GroupReady(1.0, "x", 7, 1.0),
        s.GroupReady(1.0, "x", 0, math.nan),
        s.QueueLevel(1.0, 1, 1.0),
        s.ExecutionFinished(1.0, 10**6),
        s.ExecutionStarted(1.0, -1),
    ],
)
@pytest.mark.parametrize("name", PRESETS)
def test_impossible_events_are_counted_and_change_nothing(name: str, event: s.Event) -> None:
    config = preset(name, groups_per_step=2, group_size=1)
    before, _ = feed(initial(2, 2), config, s.Tick(0.0))
    if name == "async" and event == s.MoveDone(1.0, 0):
        return  # there, cell 0 is on its way
    after, actions = feed(before, config, event)
    assert actions == []
    assert after == replace(before, now=1.0, ignored=1)


def test_an_event_from_the_past_happens_now() -> None:
    config = preset("gyre")
    state, _ = feed(initial(2, 8), config, s.Tick(10.0), s.ExecutionFinished(3.0))
    assert state.now == 10.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"preset": "best"}, "unknown scheduler preset 'best'"),
        ({"mu": 2}, "unknown field `mu`"),
        ({"readiness": 0}, "readiness must be in"),
        ({"burst_steps": 3}, "burst_steps = 3 trains groups 2 versions late"),
        ({"preset": "paper", "in_flight_extra": None}, "in_flight_extra must be given"),
        ({"groups_per_step": "8"}, "groups_per_step"),
    ],
)
def test_a_wrong_setting_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(table)


def test_a_split_without_a_rollout_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a rollout side"):
        preset("async", train_cells=2).check_cells(2, 0)
    with pytest.raises(ConfigError, match="switch_ratio must be 1"):
        preset("step-switch", train_cells=2).check_cells(2, 0)
    preset("async", train_cells=2).check_cells(2, 4)
