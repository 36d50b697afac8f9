"""Schedulers on real cells: the same long-tailed workload under `gyre` and under tuned rivals, on CPU
processes.

    python -m benchmarks.elastic_cpu [--quick] [--json FILE] [--seeds N] [--cells K] [--runs FILE --budget S]

Every run is a service with K cells (processes with an embedded engine and a trainer, weights and gradients by
Mooncake TCP or files) and a
scripted runner whose executions call the model through the router and wait for tools in between; waits are
lognormal and long-tailed. The
staleness budget is the same everywhere. Each rival runs its small grid on the first seed; its best setting
then runs on all seeds. Ratios are
taken per seed.

gyre_over             step time of `gyre` / the rival's: median over seeds, with the range [gyre_over_low,
gyre_over_high]
step_s                mean seconds per optimizer step after the first, median over seeds
idle_share            share of a cell's time in training without a micro-step, per cell, median over seeds
move_to_training_s    seconds of one rollout → training move (median of a run's mean); move_to_rollout_s the
other way
recomputed_tokens     prompt tokens computed again because of moves, per step; ..._migrated: the same seed with
kv_migration = "embedded", where migrate_ms is one migration's mean time
staleness             mean over trained tokens, in versions
router_added_p50_ms   (row `router`) latency through the router minus latency of the engine itself, same call,
alternating
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tomli_w

from gyre_backend.models import tiny_dir
from tests.service.runner import TOKEN, Runner, backend

GROUP_SIZE, GROUPS, SLOTS, STALENESS = 4, 4, 6, 1
ROUTER = ("recomputed_tokens", "migrated_tokens", "migrate_seconds", "migrations")
MEDIAN_WAIT_S, SIGMA, CALLS, REPLY = 0.2, 1.1, 4, 16


def grid(cells: int, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Settings tried per scheduler; `gyre` runs as shipped."""
    splits = [{"train_cells": n} for n in range(1, cells)]
    ratios = [{"train_cells": cells - 1, "switch_ratio": r} for r in ((0.8,) if quick else (0.4, 0.8, 1.0))]
    eager = [{"readiness": r, "hold_s": 0.0} for r in ((0.5,) if quick else (0.25, 0.5, 1.0))]
    return {
        "gyre": [{}],
        "paper": eager,
        "step-switch": ratios,
        "async": splits[:1] if quick else splits,
        "colocate": [{}],
    }


class LongTailed(Runner):
    """Waits between calls are lognormal; the same seed gives the same waits under every scheduler."""

    async def _execute(self, http: httpx.AsyncClient, order: dict[str, Any], execution: str, number: int) -> None:
        draw = np.random.default_rng([self.seed, 7, int(order["group"][1:]), number])
        wait = float(np.exp(draw.normal(np.log(MEDIAN_WAIT_S * self.calls), SIGMA)))
        await asyncio.sleep(min(wait, 60 * MEDIAN_WAIT_S))
        await super()._execute(http, order, execution, number)


@dataclass(frozen=True)
class Setting:
    """One run."""

    preset: str
    options: dict[str, Any]
    seed: int
    steps: int
    cells: int
    migration: str = "prefill"


async def run(setting: Setting, model: Path, folder: Path) -> dict[str, Any]:
    """Train, and read the run's own books."""
    config = {
        "model": {"path": str(model)},
        "train": {
            "steps": setting.steps, "group_size": GROUP_SIZE, "groups_per_step": GROUPS, "lr": 1e-4,
            "micro_tokens": 256, "checkpoint_every": 0,
        },
        "cells": {"count": setting.cells, "slots": SLOTS},
        "router": {"kv_migration": setting.migration},
        "scheduler": {
            "preset": setting.preset,
            "options": {"max_staleness": STALENESS, "in_flight_extra": 1.0, **setting.options},
        },
    }  # fmt: skip
    folder.mkdir(parents=True)
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(config))
    with backend(path, folder / "run", timeout_s=600) as service:
        runner = LongTailed(service.url, calls=CALLS, reply=REPLY, seed=setting.seed, waits=(0.0, 2 * MEDIAN_WAIT_S))
        await runner.run()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
            text = (await http.get("/v1/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).text
    if runner.errors:
        raise RuntimeError(f"{setting}: {runner.errors[0]}")
    return measures(folder / "run", text, runner.status)


def measures(run_dir: Path, prometheus: str, status: dict[str, Any]) -> dict[str, Any]:
    """Step time, idle shares, switch times ... of one run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    ends = [row["at"] for row in rows]
    counters = dict(line.split() for line in prometheus.splitlines() if line and not line.startswith("#"))
    router = {name: float(counters.get(f"gyre_router_{name}", 0)) for name in ROUTER}
    moves = {
        name: [e["seconds"] for e in events if e["event"] == name]
        for name in ("rollout to training", "training to rollout")
    }
    return {
        "step_s": (ends[-1] - ends[0]) / (len(ends) - 1),
        "idle_share": idle_shares(events, status, ends[-1]),
        "move_to_training_s": _mean(moves["rollout to training"]),
        "move_to_rollout_s": _mean(moves["training to rollout"]),
        "moves": sum(len(values) for values in moves.values()),
        "recomputed_tokens": router["recomputed_tokens"] / len(rows),
        "migrated_tokens": router["migrated_tokens"] / len(rows),
        "migrate_ms": 1e3 * router["migrate_seconds"] / max(1.0, router["migrations"]),
        "staleness": _mean([row["staleness"] for row in rows]),
        "staleness_max": max(row["staleness_max"] for row in rows),
    }


def idle_shares(events: list[dict[str, Any]], status: dict[str, Any], end: float) -> dict[str, float]:
    """Per cell: 1 - seconds of micro-steps / seconds in training."""
    shares = {}
    for cell in status["cells"]:
        since, inside = None, 0.0
        for event in (e for e in events if e.get("cell") == cell["name"]):
            if event["event"] == "rollout to training":
                since = event["at"]
            elif event["event"] == "training to rollout" and since is not None:
                inside, since = inside + event["at"] - since, None
        inside += 0.0 if since is None else max(0.0, end - since)
        shares[cell["name"]] = max(0.0, 1.0 - cell["busy_s"] / inside) if inside else 0.0
    return shares


def _mean(values: list[float]) -> float:
    return float(statistics.fmean(values)) if values else 0.0


async def router_latency(model: Path, folder: Path, calls: int) -> float:
    """Added latency of the router, ms: median of (through the router) minus median of (straight to the
    engine), one after the other.
    """
    folder.mkdir(parents=True)
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps({"model": {"path": str(model)}, "train": {"steps": 1}}))
    with backend(path, folder / "run", timeout_s=600) as service:
        log = service.log.read_text()
        engine = next(line for line in log.splitlines() if "cell0 is up" in line).split("http://")[1].split(",")[0]
        times: dict[str, list[float]] = {service.url: [], f"http://{engine}": []}
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
            for number in range(calls):
                for place, url in enumerate(times):
                    body = {"rid": f"b{number:05d}-{place}.", "input_ids": [1, 5, 9, 40 + number % 50],
                            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}  # fmt: skip
                    begun = time.perf_counter()
                    (await http.post(f"{url}/generate", json=body)).raise_for_status()
                    times[url].append(time.perf_counter() - begun)
        routed, straight = (statistics.median(values) for values in times.values())
    return 1e3 * (routed - straight)


class Book:
    """Runs that were made, one JSON line each: a benchmark that was cut into pieces goes on where it was."""

    def __init__(self, path: Path | None, budget_s: float) -> None:
        self._path = path
        self._deadline = time.monotonic() + budget_s
        self._rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._rows = [json.loads(line) for line in path.read_text().splitlines()]

    def find(self, setting: Setting) -> dict[str, Any] | None:
        """What that run measured, if it was made."""
        key = dataclasses.asdict(setting)
        return next((row["found"] for row in self._rows if row["setting"] == key), None)

    def keep(self, setting: Setting, found: dict[str, Any]) -> None:
        """On disk at once."""
        self._rows.append({"setting": dataclasses.asdict(setting), "found": found})
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(self._rows[-1]) + "\n")

    @property
    def over(self) -> bool:
        """Whether the time for new runs is up."""
        return time.monotonic() >= self._deadline


class OutOfTime(Exception):
    """The rest is for the next piece."""


async def benchmark(chosen: argparse.Namespace, book: Book, root: Path) -> list[dict[str, Any]]:
    """All rows of the seeds that every scheduler has run. Raises OutOfTime when there is none yet."""
    cells, steps, quick = chosen.cells, chosen.steps, chosen.quick
    model = tiny_dir(root / "tiny", hidden=64, layers=2)

    async def once(preset: str, options: dict[str, Any], seed: int, migration: str = "prefill") -> dict[str, Any]:
        setting = Setting(preset, options, seed, steps, cells, migration)
        found = book.find(setting)
        if found is None:
            if book.over:
                raise OutOfTime
            begun = time.monotonic()
            found = await run(setting, model, Path(tempfile.mkdtemp(dir=root)) / "run")
            book.keep(setting, found)
            print(f"{preset:12} {options} seed {seed} {migration}: {found['step_s']:.2f} s/step "
                  f"({time.monotonic() - begun:.0f} s)", file=sys.stderr)  # fmt: skip
        return found

    results: dict[str, list[dict[str, Any]]] = {}
    best: dict[str, dict[str, Any]] = {}
    extra: dict[str, float] = {}
    try:
        for preset, settings in grid(cells, quick).items():
            tried = [(await once(preset, options, 0), options) for options in settings]
            first, best[preset] = min(tried, key=lambda pair: pair[0]["step_s"])
            results[preset] = [first]
        migrated = await once("gyre", {}, 0, "embedded")
        extra = {name: migrated[name] for name in ("recomputed_tokens", "migrated_tokens", "migrate_ms")}
        for seed in range(1, chosen.seeds):  # seed by seed, so that a piece leaves whole seeds behind
            for preset in results:
                results[preset].append(await once(preset, best[preset], seed))
    except OutOfTime:
        if len(results) < len(grid(cells, quick)):
            raise
    whole = min(len(found) for found in results.values())
    rows = [row(name, found[:whole], results["gyre"][:whole], best[name]) for name, found in results.items()]
    rows[0].update({f"{name}_migrated": value for name, value in extra.items()})
    if not book.over:
        added = await router_latency(model, root / "router", 50 if quick else 300)
        rows.append({"rival": "router", "router_added_p50_ms": added})
    return rows


def row(name: str, found: list[dict[str, Any]], gyre: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """One scheduler against `gyre`."""
    ratios = [ours["step_s"] / theirs["step_s"] for ours, theirs in zip(gyre, found, strict=True)]
    numbers = (
        "step_s",
        "move_to_training_s",
        "move_to_rollout_s",
        "moves",
        "recomputed_tokens",
        "staleness",
        "staleness_max",
    )
    return {
        "rival": name,
        "options": options,
        "seeds": len(found),
        "gyre_over": statistics.median(ratios),
        "gyre_over_low": min(ratios),
        "gyre_over_high": max(ratios),
        "idle_share": {
            cell: statistics.median(f["idle_share"][cell] for f in found) for cell in found[0]["idle_share"]
        },
        **{number: statistics.median(f[number] for f in found) for number in numbers},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one setting per scheduler, few steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--runs", type=Path, help="keep every run here, and do not repeat those that are in it: for pieces"
    )
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no new run is started")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.seeds, chosen.steps = 1, 3
    with tempfile.TemporaryDirectory(prefix="gyre-elastic-") as scratch:
        try:
            rows = asyncio.run(benchmark(chosen, Book(chosen.runs, chosen.budget), Path(scratch)))
        except OutOfTime:
            print("not every scheduler has run yet: go on with the same --runs", file=sys.stderr)
            return
    for entry in rows:
        with contextlib.suppress(KeyError):
            print(f"{entry['rival']:12} gyre_over {entry['gyre_over']:.3f} [{entry['gyre_over_low']:.3f}, {entry['gyre_over_high']:.3f}]"
                  f"  {entry['step_s']:.2f} s/step  staleness {entry['staleness']:.2f}  idle {entry['idle_share']}")  # fmt: skip
    meta = {
        "quick": chosen.quick, "cells": chosen.cells, "steps": chosen.steps, "slots": SLOTS, "groups_per_step": GROUPS,
        "group_size": GROUP_SIZE, "max_staleness": STALENESS, "wait_median_s": MEDIAN_WAIT_S, "wait_sigma": SIGMA,
        "machine": platform.processor() or platform.machine(), "python": platform.python_version(),
    }  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
