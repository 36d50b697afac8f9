"""From a trace to advice: what each scheduler would do with this workload on this cluster, and what would
change that."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gyre_backend.sim.costs import JMAX_TRAIN_SHARE, Costs
from gyre_backend.sim.scenario import Scenario, train_share_costs
from gyre_backend.sim.trace import Row, read_trace, tool_share, workload_of
from gyre_backend.sim.tuning import RIVALS, Summary, best, candidates, summarize
from gyre_sdk.errors import ConfigError

MODES = ("gyre", *RIVALS)


@dataclass(frozen=True, slots=True)
class Indicators:
    """Three numbers that decide how much elastic cells can gain."""

    tail: float
    """E[longest execution of a step] / E[execution]: how long a barrier waits, in mean executions."""
    crowding: float
    """Share of executions cut at the time limit."""
    train_share: float
    """Training's share of the cells' work."""

    def sentences(self) -> list[str]:
        """What each says about this workload."""
        tail = (
            "a barrier would wait long; moving cells pays"
            if self.tail > 2
            else "executions end together; moving cells gains little"
        )
        crowd = (
            "many meet the limit together, which shortens every scheduler's tail and narrows the differences"
            if self.crowding > 0.1
            else "the limit cuts few"
        )
        if self.train_share < 0.05:
            train = "training is small: almost any split wastes its training side"
        elif self.train_share > 0.4:
            train = "training is large: every scheduler is bound by it, splits come close"
        else:
            train = "enough training to keep idle rollout cells busy, and too little for a pool of its own"
        return [
            f"tail {self.tail:.1f}x: the longest of a step's executions takes {self.tail:.1f} times the mean ({tail})",
            f"crowding {self.crowding:.0%} at the time limit ({crowd})",
            f"training share {self.train_share:.0%} ({train})",
        ]


@dataclass(frozen=True, slots=True)
class Variation:
    """gyre with one thing changed."""

    name: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer."""

    executions: int
    scenario: Scenario
    staleness: int
    indicators: Indicators
    modes: dict[str, Summary]
    variations: tuple[Variation, ...]

    @property
    def choice(self) -> str:
        """The fastest mode; the simpler one where the difference is inside the intervals."""
        fastest = min(self.modes, key=lambda m: self.modes[m].step_s)
        if fastest == "gyre":
            return "gyre"
        close = self.modes["gyre"].step_s - self.modes[fastest].step_s
        noise = max(self.modes["gyre"].step_s_95, self.modes[fastest].step_s_95)
        return "gyre" if close <= noise else fastest

    def words(self) -> list[str]:
        """The recommendation, and what would change it."""
        best_mode = self.modes[self.choice]
        others = {m: s for m, s in self.modes.items() if m != self.choice}
        rival = min(others, key=lambda m: others[m].step_s)
        gain = others[rival].step_s / best_mode.step_s - 1
        k = self.scenario.cells
        lines = [
            f"Use `{self.choice}` with K = {k} cells of {self.scenario.slots} slots: a step should take "
            f"{hours(best_mode.step_s)} (+- {hours(best_mode.step_s_95)}), {gain:+.1%} against the next best, "
            f"`{rival}` tuned for this workload."
        ]
        if gain < 0.03:
            lines.append("The lead is within what the assumptions can carry: expect a tie with the next best.")
        worth = [v for v in self.variations if v.summary.step_s < 0.97 * self.modes["gyre"].step_s]
        for change in sorted(worth, key=lambda v: v.summary.step_s):
            ours = self.modes["gyre"]
            cut = change.summary.timeout_share - ours.timeout_share
            note = f", but {cut:+.1%} of executions cut at the limit" if cut > 0.01 else ""
            lines.append(f"{change.name}: {change.summary.step_s / ours.step_s - 1:+.1%} step time{note}.")
        if not worth:
            lines.append("None of the changes tried shortens a step by 3 %.")
        return lines


def hours(seconds: float) -> str:
    """Readable time."""
    if math.isnan(seconds):
        return "?"
    return (
        f"{seconds / 3600:.2f} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.1f} s"
    )


def indicators(scenario: Scenario, seed: int = 0, batches: int = 40) -> Indicators:
    """Measured on drawn batches, at the reference load."""
    rng = random.Random(seed)
    every: list[float] = []
    longest: list[float] = []
    for _ in range(batches):
        drawn = [
            min(sample.virtual_s, scenario.timeout_s)
            for _ in range(scenario.groups_per_step)
            for sample in scenario.workload.group(rng, scenario.group_size)
        ]
        every += drawn
        longest.append(max(drawn))
    mean = statistics.fmean(every)
    train = scenario.costs.train_seconds(mean)
    roll = mean / scenario.costs.reference_load
    cut = sum(d >= scenario.timeout_s for d in every) / len(every)
    return Indicators(statistics.fmean(longest) / mean, cut, train / (train + roll))


def scenario_of(
    rows: list[Row], *, group_size: int, costs: Costs | None, train_share: float, **cluster: Any
) -> Scenario:
    """A scenario around a trace. Without `costs`, tool share from the trace (0.3 if it doesn't say) and
    `train_share`."""
    if costs is None:
        share = tool_share(rows)
        costs = train_share_costs(Costs(tool_share=0.3 if share is None else share), train_share)
    cut = [row.duration_s for row in rows if row.timed_out]
    timeout = cluster.pop("timeout_s", None) or (statistics.median(cut) if cut else math.inf)
    workload = workload_of(rows, group_size)
    return Scenario(workload=workload, costs=costs, group_size=group_size, timeout_s=timeout, **cluster)


def _variations(scenario: Scenario, staleness: int) -> Iterator[tuple[str, Scenario, dict[str, Any]]]:
    budget: dict[str, Any] = {"max_staleness": staleness}
    k, slots = scenario.cells, scenario.slots
    if k >= 2:
        coarse = replace(
            scenario,
            cells=k // 2,
            slots=slots * 2,
            gpus_per_cell=scenario.gpus_per_cell * 2,
            costs=replace(
                scenario.costs,
                load_scale=scenario.costs.load_scale * 2,
                reference_load=scenario.costs.reference_load * 2,
                train_s_per_hour=scenario.costs.train_s_per_hour / 2,
                train_s_per_token=scenario.costs.train_s_per_token / 2,
            ),
        )
        yield f"Half as many cells (K = {k // 2}), twice as large", coarse, budget
    yield f"S = {staleness + 1} (staleness budget)", scenario, {"max_staleness": staleness + 1}
    if staleness:
        yield f"S = {staleness - 1} (staleness budget)", scenario, {"max_staleness": staleness - 1}
    yield "Bursts of 2 steps (mu = 2)", scenario, {"max_staleness": max(staleness, 1), "burst_steps": 2}
    yield f"{slots * 3 // 2} slots per cell", replace(scenario, slots=slots * 3 // 2), budget
    if slots > 1:
        yield f"{slots * 3 // 4} slots per cell", replace(scenario, slots=max(1, slots * 3 // 4)), budget
    if scenario.timeout_s < math.inf:
        shorter = replace(scenario, timeout_s=scenario.timeout_s * 0.75)
        yield f"Time limit {hours(shorter.timeout_s)} instead of {hours(scenario.timeout_s)}", shorter, budget
    for cap in (5, 1):
        share = JMAX_TRAIN_SHARE[cap]
        costs = replace(
            scenario.costs,
            train_s_per_hour=scenario.costs.train_s_per_hour * share,
            train_s_per_token=scenario.costs.train_s_per_token * share,
        )
        yield f"J_max = {cap} if now uncapped (training x {share:g}, published)", replace(scenario, costs=costs), budget


def forecast(
    scenario: Scenario, staleness: int, executions: int, say: Callable[[str], None] = lambda _: None
) -> Forecast:
    """Tune every rival at this budget (time-outs at most one point above gyre's), run gyre as shipped, vary
    gyre.

    Args:
        say: told what is being simulated, for a progress display.
    """
    say("gyre")
    ours = summarize(scenario, scenario.policy("gyre", max_staleness=staleness), {"max_staleness": staleness})
    modes = {"gyre": ours}
    for mode in RIVALS:
        say(f"tuning {mode}")
        ranked = candidates(scenario, mode, staleness, steps=min(scenario.steps, 16))
        theirs = best(scenario, ranked, ours.timeout_share + 0.01)
        if theirs is not None:
            modes[mode] = theirs
    changed = []
    for name, where, options in _variations(scenario, staleness):
        say(name)
        changed.append(Variation(name, summarize(where, where.policy("gyre", **options), options)))
    return Forecast(executions, scenario, staleness, indicators(scenario), modes, tuple(changed))


def forecast_trace(
    path: Path, *, staleness: int = 1, group_size: int = 8, say: Callable[[str], None] = lambda _: None, **options: Any
) -> Forecast:
    """`read_trace`, `scenario_of`, `forecast`. Raises ConfigError."""
    rows = read_trace(path)
    if len(rows) < 8:
        raise ConfigError(f"{path}: {len(rows)} finished executions are too few to forecast from (need 8)")
    options.setdefault("costs", None)
    scenario = scenario_of(rows, group_size=group_size, **options)
    return forecast(scenario, staleness, len(rows), say)
