"""The simulator against what can be computed by hand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.cells.policy import PRESETS, PolicyConfig, preset
from gyre_backend.sim.costs import Costs
from gyre_backend.sim.engine import Simulator
from gyre_backend.sim.queue_drop import QueueDrop
from gyre_backend.sim.result import SimResult
from gyre_backend.sim.workload import LogNormal, Workload

FREE = Costs(
    to_training_s=0, to_rollout_s=0, step_s=0, reroute_s=0, train_s_per_hour=0, tool_share=1.0, micro_steps_per_group=1
)
"""Nothing costs anything, and load slows nothing."""


def simulate(config: PolicyConfig, workload: Workload, steps: int = 8, cells: int = 4, **options: object) -> SimResult:
    return build(config, workload, cells, **options).run(steps)


def build(config: PolicyConfig, workload: Workload, cells: int = 4, **options: object) -> Simulator:
    fields: dict[str, object] = {"slots": 16, **options}
    return Simulator(config, workload, num_cells=cells, **fields)  # type: ignore[arg-type]


SMALL = {"groups_per_step": 4, "group_size": 4, "max_staleness": 0}


@pytest.mark.parametrize("name", ["gyre", "paper"])
def test_one_cell_is_colocate(name: str) -> None:
    """K = 1 leaves nothing to decide: roll out everything, train everything."""
    workload = LogNormal(600, 0.8)
    one = simulate(preset(name, **SMALL), workload, cells=1, timeout_s=3000)
    both = simulate(preset("colocate", **SMALL), workload, cells=1, timeout_s=3000)
    assert [p.published for p in one.steps] == pytest.approx([p.published for p in both.steps], rel=1e-12)


@pytest.mark.parametrize("name", ["gyre", "paper", "colocate"])
def test_zero_training_is_the_makespan(name: str) -> None:
    """At S = 0 with free training, a step lasts as long as its longest execution."""
    workload = LogNormal(600, 1.0)
    result = simulate(preset(name, hold_s=0.0, **SMALL), workload, costs=FREE, seed=3)
    rng = random.Random(3)
    longest = [max(s.virtual_s for _ in range(4) for s in workload.group(rng, 4)) for _ in range(8)]
    published = [p.published for p in result.steps]
    lengths = [b - a for a, b in zip([0.0, *published], published)]
    assert lengths == pytest.approx(longest, rel=1e-9)


@pytest.mark.parametrize("cells", [1, 3])
def test_equal_executions_take_their_length_over_the_speed_of_the_load(cells: int) -> None:
    """Processor sharing: with one length and one load from start to end, speed(x) is all there is."""
    costs = Costs(train_s_per_hour=0, step_s=0, to_training_s=0, to_rollout_s=0, reroute_s=0)
    config = preset("colocate", groups_per_step=6, group_size=4)
    result = simulate(config, LogNormal(600, 0.0), cells=cells, costs=costs, steps=3, slots=32)
    each = 600 / costs.speed(24 / cells)
    assert result.seconds == pytest.approx(3 * each, rel=1e-9)


def test_a_time_limit_cuts_at_the_limit_and_keeps_what_was_done() -> None:
    config = preset("colocate", groups_per_step=2, group_size=2)
    result = simulate(config, LogNormal(5000, 0.0), costs=FREE, steps=2, timeout_s=1000)
    assert result.seconds == pytest.approx(2000)
    assert result.timeout_share() == 1.0
    assert result.steps[0].generated_s == pytest.approx(4 * 1000)


def test_training_alone_takes_work_over_cells() -> None:
    """With instant executions, n training cells share a step's micro-steps evenly."""
    from msgspec.structs import replace

    costs = replace(FREE, train_s_per_hour=3600 * 1e6, micro_steps_per_group=12)
    config = preset("colocate", groups_per_step=4, group_size=1)
    result = simulate(config, LogNormal(1e-3, 0.0), costs=costs, cells=3, steps=2)
    work = 4 * 1e-3 * 1e6
    assert result.seconds == pytest.approx(2 * work / 3, rel=1e-3)


@given(
    name=st.sampled_from(PRESETS),
    seed=st.integers(0, 1000),
    sigma=st.sampled_from([0.2, 1.0]),
    stale=st.integers(0, 2),
    cells=st.integers(2, 5),
    timeout=st.sampled_from([math.inf, 900.0]),
)
def test_work_is_conserved(name: str, seed: int, sigma: float, stale: int, cells: int, timeout: float) -> None:
    """Rollout work served = work of ended executions + progress of the others; trained work = the steps' groups' work."""
    costs = Costs(reroute_s=0, train_s_per_hour=400)
    config = preset(name, groups_per_step=3, group_size=4, max_staleness=stale)
    sim = build(config, LogNormal(600, sigma), cells, slots=5, costs=costs, seed=seed, timeout_s=timeout)
    result = sim.run(5)
    sim._sync()
    progress = sum(e.sample.virtual_s - (e.at - sim.virtual) for e in sim.running)
    progress += sum(e.sample.virtual_s - e.left for e in sim.paused)
    assert sim.served_s == pytest.approx(sim.recorder.generated_s + progress, rel=1e-6)
    done = math.fsum(step.work for step in result.steps)
    rest = sim.training.trained_work - done
    open_step = math.fsum(sim.training.groups[g.id].work for g in sim.state.members)
    assert -1e-6 <= rest <= open_step + 1e-6
    assert result.max_staleness() <= stale
    assert sim.state.ignored == 0


def test_equal_seeds_give_equal_runs() -> None:
    config = preset("gyre", groups_per_step=4, group_size=4)
    first, again = (simulate(config, LogNormal(600, 0.8), seed=5) for _ in range(2))
    assert first == again
    assert first != simulate(config, LogNormal(600, 0.8), seed=6)


@pytest.mark.parametrize(
    "system",
    [
        QueueDrop(concurrency=256, batch=64, group=8, queue=1, rho=0.5, sigma=0.7),
        QueueDrop(concurrency=128, batch=64, group=8, queue=1, rho=0.7, sigma=0.5),
        QueueDrop(concurrency=256, batch=64, group=1, queue=1, rho=0.7, sigma=0.7),
        QueueDrop(concurrency=256, batch=64, group=8, queue=1, rho=1.5, sigma=0.7),
        QueueDrop(concurrency=256, batch=64, group=8, queue=2, rho=1.5, sigma=0.7),
        QueueDrop(concurrency=256, batch=64, group=8, queue=1, rho=2.5, sigma=0.7),
    ],
)
def test_the_published_staleness_formula_holds_within_5_percent(system: QueueDrop) -> None:
    assert system.simulate(steps=220, warmup=60) == pytest.approx(system.formula(), rel=0.05)
