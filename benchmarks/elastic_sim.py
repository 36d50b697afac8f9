"""The simulator against real cells: `benchmarks.elastic_cpu`'s own measurements, and the same workload simulated.

    python -m benchmarks.elastic_sim elastic_cpu.json [--json FILE] [--seeds N]

Batch, cells, slots, waits, scheduler options and move times are the measured ones. Two costs are in no row: an
execution's engine time and a group's training time. They are fitted on the step times of `FITTED` and nothing else;
the ratios between `gyre` and the other schedulers are then predicted, and compared with the measured ones.

measured, simulated  gyre's step time over the rival's
difference           simulated / measured - 1 (aim: within 10 %)
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_backend.cells.policy import preset
from gyre_backend.sim.costs import Costs
from gyre_backend.sim.engine import Simulator
from gyre_backend.sim.workload import Sample

FITTED = ("colocate", "async")
CALLS = 4
"""Calls of an execution in `elastic_cpu`; its waits are capped at `CAP` median waits."""
CAP = 60.0
GRID = tuple(2.0**k for k in range(-5, 4))
"""Seconds tried for each fitted cost, refined around the best."""


@dataclass(frozen=True)
class Waits:
    """`elastic_cpu`'s executions: one lognormal wait, a short one between calls, and the engine's own time."""

    median_s: float
    sigma: float
    engine_s: float

    def group(self, rng: random.Random, size: int) -> list[Sample]:
        """Waits drawn as there: exp(N(log(median * calls), sigma)), capped; then up to two medians before each call."""
        out = []
        for _ in range(size):
            wait = min(self.median_s * CALLS * math.exp(self.sigma * rng.gauss(0, 1)), CAP * self.median_s)
            between = sum(rng.uniform(0, 2 * self.median_s) for _ in range(CALLS))
            out.append(Sample(wait + between + self.engine_s))
        return out

    def mean_s(self) -> float:
        """Mean length by drawing; s."""
        rng = random.Random(0)
        return statistics.fmean(s.virtual_s for s in self.group(rng, 2000))


def simulate(meta: dict[str, Any], row: dict[str, Any], engine_s: float, train_s: float, seeds: int) -> float:
    """Mean seconds per step of one scheduler, measured as there: after the first step.

    Args:
        engine_s: engine time of an execution at full slots, s.
        train_s: training time of a group on one cell, s.
    """
    work = Waits(meta["wait_median_s"], meta["wait_sigma"], engine_s)
    mean = work.mean_s()
    costs = Costs(
        to_training_s=row["move_to_training_s"],
        to_rollout_s=row["move_to_rollout_s"],
        step_s=0.1,
        reroute_s=0.0,
        tool_share=1 - engine_s / mean,
        load_scale=1.0,
        reference_load=float(meta["slots"]),
        train_s_per_hour=train_s / (meta["group_size"] * mean) * 3600,
    )
    config = preset(
        row["rival"],
        groups_per_step=meta["groups_per_step"],
        group_size=meta["group_size"],
        **{"max_staleness": meta["max_staleness"], "in_flight_extra": 1.0, **row["options"]},
    )
    times = []
    for seed in range(seeds):
        sim = Simulator(config, work, num_cells=meta["cells"], slots=meta["slots"], costs=costs, seed=seed)
        times.append(sim.run(meta["steps"]).step_s(1))
    return statistics.fmean(times)


def fit(meta: dict[str, Any], rows: dict[str, dict[str, Any]], seeds: int) -> tuple[float, float]:
    """(engine_s, train_s) with the least squared log error over `FITTED`: a coarse grid, then two finer ones."""

    def error(engine_s: float, train_s: float) -> float:
        return sum(
            math.log(simulate(meta, rows[name], engine_s, train_s, seeds) / rows[name]["step_s"]) ** 2
            for name in FITTED
        )

    best = min(((e, t) for e in GRID for t in GRID), key=lambda pair: error(*pair))
    for factor in (1.4, 1.1):
        around = [(best[0] * factor**i, best[1] * factor**j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        best = min(around, key=lambda pair: error(*pair))
    return best


def compare(document: dict[str, Any], seeds: int = 20) -> list[dict[str, Any]]:
    """A row per rival of the measured document."""
    meta = document["meta"]
    rows = {row["rival"]: row for row in document["rows"] if "step_s" in row}
    if missing := [name for name in ("gyre", *FITTED) if name not in rows]:
        raise SystemExit(f"the measurements have no row for {', '.join(missing)}: run benchmarks.elastic_cpu in full")
    engine_s, train_s = fit(meta, rows, max(2, seeds // 4))
    found = {name: simulate(meta, row, engine_s, train_s, seeds) for name, row in rows.items()}
    out: list[dict[str, Any]] = []
    for name, row in rows.items():
        measured = row["gyre_over"]
        simulated = found["gyre"] / found[name]
        out.append(
            {
                "rival": name,
                "measured": measured,
                "measured_low": row["gyre_over_low"],
                "measured_high": row["gyre_over_high"],
                "simulated": simulated,
                "difference": simulated / measured - 1,
                "measured_step_s": row["step_s"],
                "simulated_step_s": found[name],
                "fitted": name in FITTED,
                "engine_s": engine_s,
                "train_s": train_s,
            }
        )
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="what benchmarks.elastic_cpu --json wrote")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    try:
        document = json.loads(chosen.measured.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{chosen.measured} can't be read: {error}") from error
    rows = compare(document, chosen.seeds)
    for row in rows:
        print(
            f"{row['rival']:12} gyre / it: measured {row['measured']:.3f} [{row['measured_low']:.3f}, "
            f"{row['measured_high']:.3f}]  simulated {row['simulated']:.3f}  difference {row['difference']:+.1%}  "
            f"s/step {row['measured_step_s']:.2f} and {row['simulated_step_s']:.2f}{'  (fitted)' if row['fitted'] else ''}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
