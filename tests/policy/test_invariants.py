"""Invariants of the scheduler under random event orders, lost cells and dropped groups."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.cells.policy import PRESETS, PolicyConfig, preset
from tests.policy.world import World


@st.composite
def configs(draw: st.DrawFn, name: str) -> PolicyConfig:
    staleness = draw(st.sampled_from([None, 0, 1, 3]))
    top = 3 if staleness is None else min(3, staleness + 1)
    fields: dict[str, object] = {
        "groups_per_step": draw(st.integers(1, 5)),
        "group_size": draw(st.integers(1, 4)),
        "burst_steps": draw(st.integers(1, top)),
        "in_flight_extra": draw(st.sampled_from([0.0, 0.25, 1.0, 3.0])),
        "max_staleness": staleness,
        "hold_s": draw(st.sampled_from([0.0, 5.0])),
    }
    if name in ("gyre", "paper"):
        fields["readiness"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        fields["backlog_s"] = draw(st.sampled_from([None, 0.0, 60.0]))
        fields["queue_limit"] = draw(st.sampled_from([None, 0.5, 1.5]))
        fields["look_ahead"] = draw(st.booleans())
        fields["yield_to_rollout"] = draw(st.booleans())
        fields["stay_trips"] = draw(st.sampled_from([0.0, 1.0, 5.0, 1e6]))
    if name == "gyre":
        fields["starve_s"] = draw(st.sampled_from([None, 0.0, 20.0, math.inf]))
        fields["release_at_burst_end"] = draw(st.booleans()) or fields["starve_s"] == math.inf
    if name == "step-switch":
        fields["switch_ratio"] = draw(st.sampled_from([0.2, 0.8, 1.0]))
    if name in ("step-switch", "async"):
        fields["streaming"] = draw(st.booleans())
    return preset(name, **fields)


@st.composite
def worlds(draw: st.DrawFn, name: str, faults: bool) -> World:
    config = draw(configs(name))
    cells = draw(st.integers(1, 4))
    standalone = draw(st.sampled_from([0, 0, 3]))
    if name in ("step-switch", "async"):
        standalone = standalone or 2
    return World(
        config=config,
        num_cells=cells,
        slots=draw(st.integers(1, 8)),
        standalone=standalone,
        seed=draw(st.integers(0, 2**32)),
        faults=draw(st.sampled_from([0.01, 0.1])) if faults else 0.0,
        drops=draw(st.sampled_from([0.0, 0.2])),
    )


@pytest.mark.parametrize("name", PRESETS)
@given(data=st.data())
def test_any_order_of_events_keeps_every_invariant_and_reaches_the_end(name: str, data: st.DataObject) -> None:
    data.draw(worlds(name, faults=False)).run(steps=4)


@pytest.mark.parametrize("name", PRESETS)
@given(data=st.data())
def test_cells_lost_at_any_point_cost_no_group_and_no_progress(name: str, data: st.DataObject) -> None:
    data.draw(worlds(name, faults=True)).run(steps=4)
