"""Tuning a scheduler on a scenario: a grid per mode, at one staleness budget, and the summary of repeated
runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_backend.cells.policy import PolicyConfig
from gyre_backend.sim.scenario import Scenario

RIVALS = ("paper", "step-switch", "async", "colocate")

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond 30 the normal's is close enough.
_T95: tuple[float, ...] = (
    math.nan,
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
)
_T95 += (2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)


def interval95(values: Sequence[float]) -> float:
    """Half-width of the 95 % confidence interval of the mean; NaN for fewer than two values."""
    n = len(values)
    if n < 2:
        return math.nan
    t = _T95[n - 1] if n - 1 < len(_T95) else 1.96
    return t * statistics.stdev(values) / math.sqrt(n)


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated runs of one scheduler on one scenario."""

    config: PolicyConfig
    options: dict[str, Any]
    """What was set on top of the preset."""
    step_s: float
    step_s_95: float
    """Half-width of the 95 % interval over seeds."""
    timeout_share: float
    staleness: float
    max_staleness: int
    idle_share: float
    gpu_hours_per_step: float
    groups_per_hour: float
    """Groups trained."""
    step_s_by_seed: tuple[float, ...]


def summarize(
    scenario: Scenario,
    config: PolicyConfig,
    options: dict[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
) -> Summary:
    """Run every seed and average."""
    runs = [scenario.simulate(config, seed, steps) for seed in (seeds or range(scenario.seeds))]
    warm = scenario.warmup
    times = tuple(run.step_s(warm) for run in runs)
    step_s = statistics.fmean(times)
    gpus = (scenario.cells + scenario.standalone / scenario.slots) * scenario.gpus_per_cell
    return Summary(
        config=config,
        options=options or {},
        step_s=step_s,
        step_s_95=interval95(times),
        timeout_share=statistics.fmean(run.timeout_share(warm) for run in runs),
        staleness=statistics.fmean(run.staleness(warm) for run in runs),
        max_staleness=max(run.max_staleness() for run in runs),
        idle_share=statistics.fmean(run.idle_share(warm) for run in runs),
        gpu_hours_per_step=gpus * step_s / 3600,
        groups_per_hour=scenario.groups_per_step / step_s * 3600,
        step_s_by_seed=times,
    )


def filling(mode: str, staleness: int | None, cells: int) -> dict[str, Any]:
    """Options with which `mode`, untuned, uses up the staleness budget S (None: the preset as it is) on `cells` cells."""
    pools = {"step-switch": {"train_cells": max(1, cells // 2), "switch_ratio": 0.8 if cells > 1 else 1.0}}
    pools["async"] = {"train_cells": max(1, cells // 4)}
    sides: dict[str, Any] = pools.get(mode, {})
    if staleness is None:
        return sides
    fill = {"burst_steps": staleness + 1} if mode == "colocate" else {"in_flight_extra": None}
    return {"max_staleness": staleness, **fill, **sides}


def grid(mode: str, scenario: Scenario, staleness: int) -> Iterator[dict[str, Any]]:
    """Options worth trying for `mode` at the staleness budget S. `gyre` has none: its preset is used as it
    is.

    Every mode may fill the budget or half of it; bursts go up to S + 1 steps.
    """
    budget = {"max_staleness": staleness}
    extras = sorted({staleness / 2, float(staleness)})
    cells = scenario.cells
    if mode == "gyre":
        yield budget
    elif mode == "colocate":
        for burst in range(1, staleness + 2):
            yield {**budget, "burst_steps": burst}
    elif mode == "paper":
        for burst in sorted({1, max(1, (staleness + 1) // 2), staleness + 1}):
            for extra in sorted({0.0, (staleness + 1) / burst - 1}):
                for phi in (0.1, 0.25):
                    yield {**budget, "burst_steps": burst, "in_flight_extra": extra, "readiness": phi}
    elif mode == "async":
        most = cells - 1 if scenario.standalone == 0 else cells
        for train in sorted({n for n in (1, cells // 4, 3 * cells // 8, cells // 2, 5 * cells // 8) if 1 <= n <= most}):
            for extra in extras:
                yield {**budget, "train_cells": train, "in_flight_extra": extra}
    elif mode == "step-switch":
        for train in sorted({max(1, n) for n in (cells // 4, cells // 2, 3 * cells // 4, cells)}):
            ratios = (0.4, 0.6, 0.8, 1.0) if train < cells or scenario.standalone else (1.0,)
            for ratio in ratios:
                for extra in extras:
                    yield {**budget, "train_cells": train, "switch_ratio": ratio, "in_flight_extra": extra}


def candidates(scenario: Scenario, mode: str, staleness: int, seed: int = 0, steps: int | None = None) -> list[Summary]:
    """Every option of the grid on one seed, fastest first."""
    out = []
    for options in grid(mode, scenario, staleness):
        config = scenario.policy(mode, **options)
        try:
            config.check_cells(scenario.cells, scenario.standalone)
        except ValueError:
            continue  # this split can't run on so few cells
        out.append(summarize(scenario, config, options, seeds=(seed,), steps=steps))
    return sorted(out, key=lambda s: s.step_s)


def tune(
    scenario: Scenario, mode: str, staleness: int, max_timeout_share: float = 1.0, finalists: int = 2
) -> Summary | None:
    """The fastest options whose time-out share is at most `max_timeout_share`: grid on one seed, finalists on
    all seeds.

    None if no option keeps the share.
    """
    return best(scenario, candidates(scenario, mode, staleness), max_timeout_share, finalists)


def best(
    scenario: Scenario,
    ranked: Sequence[Summary],
    max_timeout_share: float,
    finalists: int = 2,
    seeds: Sequence[int] | None = None,
) -> Summary | None:
    """The fastest of `ranked` (see `candidates`) within the share, finalists run again on all seeds (the scenario's, unless
    given)."""
    allowed = [s for s in ranked if s.timeout_share <= max_timeout_share][:finalists]
    again = [summarize(scenario, s.config, s.options, seeds) for s in allowed]
    return min(again, key=lambda s: s.step_s, default=None)
