"""What every scheduler hears and answers, event by event, against recorded digests: making the simulator faster
must change nothing, and a rule that is changed on purpose shows which presets it touches.

Lengths are fixed fractions and no library function enters, so the digests hold wherever floats are IEEE doubles.
A digest changed on purpose: `python -m tests.sim.test_golden` prints the new table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gyre_backend.cells.policy import PRESETS, preset
from gyre_backend.sim import engine
from gyre_backend.sim.costs import Costs
from gyre_backend.sim.engine import Simulator
from gyre_backend.sim.workload import Recorded, Sample

WORKLOAD = Recorded(
    tuple(
        tuple(Sample(300.0 + 37.0 * ((7 * task + 11 * run * run) % 29) + (task % 5 == 0) * 2000.0) for run in range(4))
        for task in range(23)
    )
)
COSTS = Costs(tool_share=0.25, train_s_per_hour=100.0, pull_s=1.5, gather_s=0.5)

CASES: dict[str, dict[str, Any]] = {
    "on-policy": {"max_staleness": 0},
    "stale": {"max_staleness": 2, "in_flight_extra": 2.0},
    "limited": {"max_staleness": 1, "in_flight_extra": 1.0},
}

GOLDEN: dict[tuple[str, str], str] = {
    ("paper", "on-policy"): "2aeec15e1263950f",
    ("paper", "stale"): "18734c820decd7b9",
    ("paper", "limited"): "5d3f6d504e9a244f",
    ("gyre", "on-policy"): "051583b24ae94e4c",
    ("gyre", "stale"): "9e49cd1d5d89c742",
    ("gyre", "limited"): "64bcea8dba5615d1",
    ("step-switch", "on-policy"): "34b554852d6c257a",
    ("step-switch", "stale"): "b64dc2d578c6b2ea",
    ("step-switch", "limited"): "a83be756fdb20b2a",
    ("async", "on-policy"): "d2a200688a7e113e",
    ("async", "stale"): "f1e897b7f7ce3700",
    ("async", "limited"): "4cadea722496d00c",
    ("colocate", "on-policy"): "6b5a7a6db91fc3f1",
    ("colocate", "stale"): "b45cc901aa9940f9",
    ("colocate", "limited"): "42d8b50771f2f62a",
}


@contextmanager
def recorded(digest: Any) -> Iterator[None]:
    """Every call of the policy goes into `digest`."""
    plain = engine.decide

    def decide(state: Any, event: Any, config: Any) -> Any:
        after, actions = plain(state, event, config)
        digest.update(f"{event!r} {actions!r}\n".encode())
        return after, actions

    engine.decide = decide
    try:
        yield
    finally:
        engine.decide = plain


def trace(name: str, case: str) -> str:
    """Digest of a run of 12 steps: all events and actions, each step's times, the roles."""
    digest = hashlib.sha256()
    options: dict[str, Any] = {"groups_per_step": 6, "group_size": 4, **CASES[case]}
    if name in ("step-switch", "async"):
        options["train_cells"] = 2
    limit = 1500.0 if case == "limited" else float("inf")
    with recorded(digest):
        sim = Simulator(preset(name, **options), WORKLOAD, num_cells=4, slots=6, costs=COSTS, seed=11, timeout_s=limit)
        result = sim.run(12)
    digest.update(repr((result.steps, result.roles, result.reroutes, result.events, sim.served_s)).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_event_and_action_is_as_recorded(name: str, case: str) -> None:
    assert trace(name, case) == GOLDEN[name, case]


if __name__ == "__main__":
    for each in PRESETS:
        for what in CASES:
            print(f'    ("{each}", "{what}"): "{trace(each, what)}",')
