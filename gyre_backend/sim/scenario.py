"""A scenario: cluster, batch, workload and costs of a simulated run, without the scheduler. Read from TOML.

[cluster]   cells = 8, slots = 32, standalone = 0, gpus_per_cell = 8
[batch]     groups_per_step = 32, group_size = 8, timeout_s = 28800
[workload]  kind = "lognormal", median_s, sigma, task_share
            kind = "mixture", parts = [{weight, median_s, sigma}, ...]
            kind = "trace", path = "runs/..." (a run folder, CSV or JSONL; see `trace`)
[costs]     any field of `Costs`, or train_share = 0.2 (training's share of the cells' work)
[scheduler] preset = "gyre", and any field of `PolicyConfig`
[run]       steps = 28, warmup = 4, seeds = 3
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre_backend.cells.policy import PolicyConfig, from_mapping
from gyre_backend.sim.costs import Costs
from gyre_backend.sim.engine import Simulator
from gyre_backend.sim.result import SimResult
from gyre_backend.sim.trace import recorded
from gyre_backend.sim.workload import LogNormal, Mixture, Workload
from gyre_sdk.errors import ConfigError

WARMUP = 4
"""Steps at the beginning of a run that are not counted, unless a scenario says otherwise."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the scheduler."""

    workload: Workload
    costs: Costs = Costs()
    cells: int = 8
    """K."""
    slots: int = 32
    """C_e."""
    standalone: int = 0
    gpus_per_cell: int = 8
    groups_per_step: int = 32
    group_size: int = 8
    timeout_s: float = math.inf
    steps: int = 28
    warmup: int = WARMUP
    """Steps not counted. `steps - warmup` should be a multiple of every burst compared: bursts make steps
    unequal."""
    seeds: int = 3

    def policy(self, preset: str, **options: Any) -> PolicyConfig:
        """A scheduler for this batch."""
        batch = {"groups_per_step": self.groups_per_step, "group_size": self.group_size}
        return from_mapping({"preset": preset, **batch, **options})

    def simulate(self, config: PolicyConfig, seed: int = 0, steps: int | None = None) -> SimResult:
        """One run."""
        sim = Simulator(
            config,
            self.workload,
            num_cells=self.cells,
            slots=self.slots,
            standalone=self.standalone,
            timeout_s=self.timeout_s,
            costs=self.costs,
            seed=seed,
        )
        return sim.run(self.steps if steps is None else steps)


def train_share_costs(costs: Costs, share: float) -> Costs:
    """`costs` with training taking `share` of the work when rollout runs at the reference load.

    A virtual hour of rollout takes 3600 / reference_load cell-seconds there, so training one takes
    3600 / reference_load * share / (1 - share).
    """
    if not 0 <= share < 1:
        raise ConfigError(f"costs.train_share must be in [0, 1), got {share}")
    seconds = 3600 / costs.reference_load * share / (1 - share)
    return msgspec.structs.replace(costs, train_s_per_hour=seconds)


def read_costs(table: Mapping[str, Any]) -> Costs:
    """`[costs]`. Raises ConfigError."""
    fields = dict(table)
    share = fields.pop("train_share", None)
    if share is not None and "train_s_per_hour" in fields:
        raise ConfigError("costs: give train_share or train_s_per_hour, not both")
    try:
        costs = msgspec.convert(fields, Costs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"costs: {error}") from error
    return costs if share is None else train_share_costs(costs, float(share))


def read_workload(table: Mapping[str, Any], base: Path = Path()) -> Workload:
    """`[workload]`. Raises ConfigError."""
    fields = dict(table)
    kind = fields.pop("kind", "lognormal")
    try:
        if kind == "lognormal":
            return msgspec.convert(fields, LogNormal)
        if kind == "mixture":
            parts = []
            for part in fields.pop("parts", ()):
                weight = part.pop("weight", 1.0)
                parts.append((float(weight), msgspec.convert(part, LogNormal)))
            if fields:
                raise ConfigError(f"workload: unknown key {next(iter(fields))!r} for a mixture")
            return Mixture(tuple(parts))
        if kind == "trace":
            return recorded(base / str(fields["path"]))
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload: {error}") from error
    except KeyError as error:
        raise ConfigError(f"workload: missing key {error.args[0]!r}") from error
    raise ConfigError(f"workload.kind must be lognormal, mixture or trace, got {kind!r}")


_BATCH = {"groups_per_step", "group_size", "timeout_s"}
_CLUSTER = {"cells", "slots", "standalone", "gpus_per_cell"}
_RUN = {"steps", "warmup", "seeds"}


def parse(document: Mapping[str, Any], base: Path = Path()) -> tuple[Scenario, PolicyConfig]:
    """From a TOML document. Raises ConfigError naming the table and key."""
    known = {"cluster", "batch", "workload", "costs", "scheduler", "run"}
    if extra := sorted(set(document) - known):
        raise ConfigError(f"unknown table [{extra[0]}]: expected {', '.join(sorted(known))}")
    fields: dict[str, Any] = {}
    for name, keys in (("cluster", _CLUSTER), ("batch", _BATCH), ("run", _RUN)):
        table = document.get(name, {})
        if extra := sorted(set(table) - keys):
            raise ConfigError(f"{name}: unknown key {extra[0]!r}: expected {', '.join(sorted(keys))}")
        fields |= table
    timeout = float(fields.get("timeout_s", math.inf))
    counts = [k for k in fields if k != "timeout_s" and k not in ("standalone", "warmup")]
    for key in counts:
        if not isinstance(fields[key], int) or fields[key] < 1:
            raise ConfigError(f"{key} must be a whole number >= 1, got {fields[key]!r}")
    if not timeout > 0 or fields.get("warmup", 0) >= fields.get("steps", 28):
        raise ConfigError("need timeout_s > 0 and run.warmup < run.steps")
    scenario = Scenario(
        workload=read_workload(document.get("workload", {}), base),
        costs=read_costs(document.get("costs", {})),
        **{**fields, "timeout_s": timeout},
    )
    table = dict(document.get("scheduler", {}))
    config = scenario.policy(table.pop("preset", "gyre"), **table)
    config.check_cells(scenario.cells, scenario.standalone)
    return scenario, config


def load(path: Path) -> tuple[Scenario, PolicyConfig]:
    """Read a TOML file. Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    try:
        return parse(document, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
