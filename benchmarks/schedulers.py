"""Step time of every scheduler over a sweep of workloads: `gyre` as shipped against rivals tuned at each
point.

    python -m benchmarks.schedulers [--quick | --held-out N] [--json FILE] [--jobs N]

Each row is one sweep point at one staleness budget S (no group trains more than S versions after its
dispatch, in any mode). `gyre` runs its preset untouched. Each rival (`paper`, `step-switch`, `async`,
`colocate`) is tuned at the point: its whole grid on one seed, the two best again on all seeds, longer. The preset was
chosen on seeds 0-3 of the fixed points; what is reported comes from seeds 100 and up, and `--held-out N` takes N
points drawn at random that nothing was chosen on. Rivals count
only while their time-out share is at most `gyre`'s plus one point: a pool that pauses executions looks fast
because their clocks run on and less work gets done (`fastest_any` shows what dropping that condition would
give).

step_h_*             mean hours per step, after the warm-up, over seeds
gyre_over_best_rival gyre's step time over the best allowed rival's (`gyre_over_*`: over one mode's)
bound_h              a floor for every scheduler (`floor_s`); bound_over_best_rival says what a perfect one could reach
timeouts_*           share of executions cut at the time limit
idle_*               share of cell-time in training without work or between roles
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from gyre_backend.sim.costs import Costs
from gyre_backend.sim.result import SimResult
from gyre_backend.sim.scenario import Scenario, train_share_costs
from gyre_backend.sim.tuning import RIVALS, best, candidates, summarize
from gyre_backend.sim.workload import LogNormal, Mixture, Workload

HOUR = 3600.0
SEARCH_STEPS = 12
"""Length of the runs that rank a grid; the finalists run in full."""
SEEDS = (100, 101)
"""Seeds of what is reported; nothing was tuned on them."""
SLACK = 0.01
"""A rival's time-out share may exceed gyre's by this much."""

WORKLOADS: dict[str, tuple[Workload, float, float]] = {
    # name: (distribution, time limit s, tool share)
    "2.4T": (LogNormal(4.853 * HOUR, 0.686), 8 * HOUR, 0.3),
    "122B": (LogNormal(1.2 * HOUR, 0.92), 8 * HOUR, 0.4),
    "narrow": (LogNormal(2 * HOUR, 0.3), 8 * HOUR, 0.3),
    "heavy": (LogNormal(1 * HOUR, 1.2), 8 * HOUR, 0.3),
    "mixture": (Mixture(((0.8, LogNormal(0.5 * HOUR, 0.5)), (0.2, LogNormal(4 * HOUR, 0.5)))), 8 * HOUR, 0.4),
    "minutes": (LogNormal(300, 0.9), 2400, 0.5),
}


def points(quick: bool) -> list[dict[str, Any]]:
    """The sweep: workload x training share x S, and one variation at a time of batch, cells and switch
    cost."""
    base = {"share": 0.2, "S": 1, "B": 32, "cells": 8, "switch": 1.0}
    if quick:
        return [{**base, "workload": name} for name in ("2.4T", "122B", "mixture")]
    out = [
        {**base, "workload": name, "share": share, "S": stale}
        for share, stale in ((0.3, 1), (0.2, 0), (0.1, 1), (0.2, 3))
        for name in WORKLOADS
    ]
    for name in ("2.4T", "122B", "heavy", "mixture"):
        out.append({**base, "workload": name, "B": 64})
    for name in ("2.4T", "122B"):
        out.append({**base, "workload": name, "cells": 4, "B": 16})
        out.append({**base, "workload": name, "switch": 20.0})
    return out


def drawn(count: int, seed: int = 2026) -> list[dict[str, Any]]:
    """Points nobody chose: every coordinate at random from its range."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        stale, cells = rng.choice((0, 1, 1, 2, 3)), rng.choice((4, 8, 8, 16))
        out.append(
            {
                "workload": rng.choice(list(WORKLOADS)),
                "share": round(rng.uniform(0.08, 0.4), 2),
                "S": stale,
                "B": rng.choice((2, 4) if cells == 16 else (2, 4, 4, 8)) * cells,
                "cells": cells,
                "switch": rng.choice((0.5, 1.0, 1.0, 5.0, 20.0)),
            }
        )
    return out


def floor_s(where: Scenario, stale: int, result: SimResult) -> float:
    """No scheduler makes steps shorter than this, at the time-out share of `result`.

    Work: all cells always busy, rollout always at full slots. Time: what is dispatched at version u must be trained by
    step u + S, so S + 1 steps take as long as a batch's longest execution, alone on its cell, and one step's end.
    """
    steps = result.after(where.warmup)
    generated, work = (math.fsum(getattr(p, name) for p in steps) / len(steps) for name in ("generated_s", "work"))
    cells = where.cells + where.standalone / where.slots
    busy = (generated / (where.slots * where.costs.speed(where.slots)) + work) / cells
    rng = random.Random(0)
    longest = []
    for _ in range(40):
        groups = [where.workload.group(rng, where.group_size) for _ in range(where.groups_per_step)]
        alone = max(one.virtual_s for group in groups for one in group) / where.costs.speed(0)
        longest.append(min(alone, where.timeout_s))
    return max(busy, (statistics.fmean(longest) + where.costs.step_s) / (stale + 1))


def scenario(point: dict[str, Any], quick: bool) -> Scenario:
    """The point's scenario."""
    workload, timeout, tools = WORKLOADS[point["workload"]]
    costs = Costs(tool_share=tools)
    costs = msgspec.structs.replace(
        costs,
        to_training_s=costs.to_training_s * point["switch"],
        to_rollout_s=costs.to_rollout_s * point["switch"],
        step_s=5.0 if point["workload"] == "minutes" else costs.step_s,
    )
    return Scenario(
        workload=workload,
        costs=train_share_costs(costs, point["share"]),
        cells=point["cells"],
        groups_per_step=point["B"],
        timeout_s=timeout,
        steps=16 if quick else 4 + 12 * (point["S"] + 1),
        seeds=len(SEEDS),
    )


def measure(job: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    """One row."""
    point, quick = job
    where = scenario(point, quick)
    stale = point["S"]
    config = where.policy("gyre", max_staleness=stale)
    ours = summarize(where, config, seeds=SEEDS)
    bound = floor_s(where, stale, where.simulate(config, SEEDS[0]))
    row: dict[str, Any] = {**point, "step_h_gyre": ours.step_s / HOUR, "timeouts_gyre": ours.timeout_share}
    row |= {"idle_gyre": ours.idle_share, "staleness_gyre": ours.staleness}
    fastest_any = float("inf")
    over: dict[str, float] = {}
    for mode in RIVALS:
        ranked = candidates(where, mode, stale, SEEDS[0], steps=where.warmup + SEARCH_STEPS)
        if ranked:
            fastest_any = min(fastest_any, ranked[0].step_s)
        theirs = best(where, ranked, ours.timeout_share + SLACK, seeds=SEEDS)
        if theirs is None:
            continue
        over[mode] = ours.step_s / theirs.step_s
        row |= {f"step_h_{mode}": theirs.step_s / HOUR, f"timeouts_{mode}": theirs.timeout_share}
        row |= {f"gyre_over_{mode}": over[mode], f"idle_{mode}": theirs.idle_share}
        row[f"tuned_{mode}"] = {k: v for k, v in theirs.options.items() if k != "max_staleness"}
    row["best_rival"] = max(over, key=lambda mode: over[mode])
    row["gyre_over_best_rival"] = over[row["best_rival"]]
    row["gyre_over_best_but_paper"] = max((r for m, r in over.items() if m != "paper"), default=float("nan"))
    row["fastest_any_h"] = fastest_any / HOUR
    row["bound_h"] = bound / HOUR
    row["bound_over_best_rival"] = bound / (ours.step_s / row["gyre_over_best_rival"])
    row["gyre_over_bound"] = ours.step_s / bound
    return row


def aggregate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The aims, over all rows."""

    def of(key: str) -> dict[str, float]:
        ratios = sorted(r[key] for r in rows)
        return {
            "median": statistics.median(ratios),
            "worst": ratios[-1],
            "best": ratios[0],
            "at_most_1": sum(r <= 1.0 for r in ratios) / len(ratios),
            "at_most_1.01": sum(r <= 1.01 for r in ratios) / len(ratios),
        }

    modes = {f"gyre_over_{m}": _median([r[f"gyre_over_{m}"] for r in rows if f"gyre_over_{m}" in r]) for m in RIVALS}
    return {
        "gyre_over_best_rival": of("gyre_over_best_rival"),
        "gyre_over_best_but_paper": of("gyre_over_best_but_paper"),
        "bound_over_best_rival": of("bound_over_best_rival"),
        "gyre_over_bound": of("gyre_over_bound"),
        "median_by_rival": modes,
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def show(row: dict[str, Any]) -> str:
    """One line."""
    head = f"{row['workload']:8} train {row['share']:.1f} S {row['S']} B {row['B']:3} K {row['cells']:2} x{row['switch']:<4g}"
    cells = [f"gyre {row['step_h_gyre']:6.3f} h {row['timeouts_gyre']:.3f}"]
    cells += [f"{m} {row[f'step_h_{m}']:6.3f}" for m in RIVALS if f"step_h_{m}" in row]
    return f"{head}  {'  '.join(cells)}  floor {row['bound_h']:6.3f}  ratio {row['gyre_over_best_rival']:.3f} ({row['best_rival']})"


VARIANTS: dict[str, dict[str, Any]] = {
    "without look-ahead": {"look_ahead": False},
    "without yielding": {"yield_to_rollout": False},
    "without both": {"look_ahead": False, "yield_to_rollout": False},
    "no backlog gate (b = 0)": {"backlog_s": 0.0},
    "backlog gate of 20 round trips": {"backlog_trips": 20.0},
    "late core (phi = .5)": {"readiness": 0.5},
    "cells held until the step's end (s = inf)": {"starve_s": float("inf")},
    "bursts of S + 1 steps": {"burst_steps": 2},
    "release at the burst's end": {"release_at_burst_end": True},
}


def ablation() -> list[dict[str, Any]]:
    """Step time of gyre with one rule changed over gyre as shipped, at S = 1."""
    base = {"S": 1, "B": 32, "cells": 8, "switch": 1.0}
    rows: list[dict[str, Any]] = [{"variant": name} for name in VARIANTS]
    for name in ("2.4T", "122B", "narrow", "heavy", "mixture"):
        where = scenario({**base, "workload": name, "share": 0.2}, quick=False)
        shipped = summarize(where, where.policy("gyre"))
        for row in rows:
            changed = summarize(where, where.policy("gyre", **VARIANTS[row["variant"]]))
            row[name] = changed.step_s / shipped.step_s
    return rows


def speeds() -> dict[str, float]:
    """Simulated events per CPU second of every preset, on the 122B workload (policy calls and clock events both count)."""
    where = scenario({"workload": "122B", "share": 0.2, "S": 1, "B": 32, "cells": 8, "switch": 1.0}, quick=False)
    out = {}
    for mode in ("gyre", *RIVALS):
        config = where.policy(mode, max_staleness=1, in_flight_extra=None)
        begun = time.process_time()
        events = where.simulate(config, steps=40).events
        out[mode] = events / (time.process_time() - begun)
    return out


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three points, fewer seeds")
    parser.add_argument("--held-out", type=int, metavar="N", help="N points drawn at random instead of the fixed ones")
    parser.add_argument("--json", type=Path, help="write {meta, rows}")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--ablation", action="store_true", help="only gyre against itself with one rule changed")
    parser.add_argument("--speed", action="store_true", help="only the simulator's own speed")
    args = parser.parse_args()
    if args.ablation:
        for row in ablation():
            print(f"{row.pop('variant'):44}", "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
        return
    if args.speed:
        for mode, rate in speeds().items():
            print(f"{mode:12} {rate:9.0f} events/s")
        return
    begun = time.time()
    chosen = drawn(args.held_out) if args.held_out else points(args.quick)
    jobs = [(point, args.quick) for point in chosen]
    rows = []
    with contextlib.ExitStack() as stack:
        several = args.jobs > 1
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(args.jobs)) if several else None
        for row in pool.imap(measure, jobs) if pool else map(measure, jobs):
            rows.append(row)
            print(show(row), flush=True)
            if args.json:
                write(args.json, rows, time.time() - begun)
    print(json.dumps(aggregate(rows), indent=2))


def write(path: Path, rows: list[dict[str, Any]], seconds: float) -> None:
    """The rows so far: an interrupted sweep keeps what it has."""
    meta = {
        "benchmark": "schedulers",
        "basis": "simulated; assumptions in gyre_backend/sim/costs.py and docs/forecast.md",
        "python": platform.python_version(),
        "seconds": round(seconds, 1),
        "timeout_slack": SLACK,
        **aggregate(rows),
    }
    path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
