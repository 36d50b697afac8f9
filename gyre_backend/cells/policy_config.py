"""Settings of the scheduler, and the presets. TOML-able: `[scheduler] preset = "gyre"` plus any field
below."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from gyre_sdk.errors import ConfigError

Moves = Literal["serial", "pool", "static", "barrier"]


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """One scheduler. Defaults are those of the preset `paper`; `preset(name)` gives the others."""

    moves: Moves = "serial"
    """serial: one cell at a time, core first, by the waterlevel. pool: cells `0..train_cells-1` together,
    between steps only (step switch). static: cells `0..train_cells-1` always train (async). barrier: all
    cells, when nothing is unfinished (colocate)."""
    groups_per_step: int = 32
    """B."""
    group_size: int = 8
    """Executions per group."""
    burst_steps: int = 1
    """mu: optimizer steps per burst."""
    in_flight_extra: float | None = 0.0
    """eta: at a burst's start groups are sent until (1 + eta) * mu * B are in flight, ready or in the open
    step. None: as many as `max_staleness` allows."""
    queue_limit: float | None = None
    """At a burst's start w is raised to at most this many times the slots of all cells, or a step's executions if those are
    more (and never below what the burst needs): executions that only wait keep w above the waterlevel, so that nothing
    trains until a backlog has drained. None: no bound but the in-flight limit."""
    max_staleness: int | None = None
    """S: no group trains later than S versions after its dispatch. A step waits for the groups that fall due
    in it, and the groups outstanding are at most (S + 1) * B. None: no bound."""
    readiness: float = 0.25
    """phi: the core moves when phi * mu * B groups (or all the burst still needs, if fewer) are ready ..."""
    hold_s: float = 60.0
    """h: ... and have been for h seconds."""
    backlog_s: float | None = 0.0
    """b: a satellite joins only if the queued work gives every training cell, itself included, b seconds. 0:
    no such gate. None: `backlog_trips` measured round trips."""
    backlog_trips: float = 1.0
    starve_s: float | None = math.inf
    """s: a training cell returns after s seconds without work. inf: it stays until the burst's end. None:
    `starve_trips` measured round trips."""
    starve_trips: float = 1.0
    round_trip_s: float = 12.0
    """Cost of a move there and back until both have been measured, s (the paper's 8.52 + 3.46)."""
    stay_trips: float = 0.0
    """A core without a step stays in training if the next step's last group is expected within this many measured round
    trips, whatever waits for slots: where steps are short against moves, a fixed side is the better one."""
    release_at_burst_end: bool = True
    """Training cells return after each burst (the core stays if the next batch is ready and the rest covers
    w)."""
    yield_to_rollout: bool = False
    """A training cell returns, and no step begins, while executions find no slot (w > C_R), unless the step
    already has all its groups."""
    look_ahead: bool = False
    """A satellite joins only if the cells that train now couldn't finish the queued work before the step's
    last group is expected, and the last one returns when the others can. Training is then done just in time,
    by as few cells as needed, while the rollout is emptiest."""
    streaming: bool = True
    """A step may begin before all its groups are ready. Off: at B ready groups."""
    train_cells: int = 1
    """pool and static: how many cells train (cells 0..train_cells-1)."""
    switch_ratio: float = 0.4
    """pool: reclaim when round(ratio * B) groups are ready (verl's rule and default)."""

    def __post_init__(self) -> None:
        at_least_one = ("groups_per_step", "group_size", "burst_steps", "train_cells")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ConfigError(f"scheduler.{name} must be at least 1, got {getattr(self, name)}")
        if self.queue_limit is not None and not self.queue_limit > 0:
            raise ConfigError(f"scheduler.queue_limit must be > 0, got {self.queue_limit}")
        if self.in_flight_extra is None and self.max_staleness is None:
            raise ConfigError("scheduler.in_flight_extra must be given when max_staleness is not")
        for name in ("in_flight_extra", "hold_s", "backlog_trips", "starve_trips", "stay_trips", "round_trip_s"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                raise ConfigError(f"scheduler.{name} must be a finite number >= 0, got {getattr(self, name)}")
        for name in ("readiness", "switch_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"scheduler.{name} must be in (0, 1], got {getattr(self, name)}")
        for name in ("backlog_s", "starve_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"scheduler.{name} must be >= 0, got {value}")
        if self.max_staleness is not None:
            if self.max_staleness < 0:
                raise ConfigError(f"scheduler.max_staleness must be >= 0, got {self.max_staleness}")
            if self.burst_steps > self.max_staleness + 1:
                raise ConfigError(
                    f"scheduler.burst_steps = {self.burst_steps} trains groups {self.burst_steps - 1} versions "
                    f"late, but max_staleness is {self.max_staleness}: use burst_steps <= max_staleness + 1"
                )

    @cached_property
    def limit(self) -> int:
        """Most groups outstanding (in flight, ready and in the open step)."""
        budget = math.inf if self.max_staleness is None else (self.max_staleness + 1) * self.groups_per_step
        extra = math.inf if self.in_flight_extra is None else self.in_flight_extra
        wished = (1 + extra) * self.burst_steps * self.groups_per_step
        return math.floor(min(budget, wished) + 1e-9)

    @cached_property
    def ready_needed(self) -> int:
        """phi * mu * B, groups."""
        return math.ceil(self.readiness * self.burst_steps * self.groups_per_step - 1e-9)

    def check_cells(self, num_cells: int, standalone: int) -> None:
        """Refuse a cell count this scheduler would deadlock on.

        Raises:
            ConfigError: a split that leaves no rollout capacity, or more training cells than cells.
        """
        if self.moves not in ("pool", "static"):
            return
        if self.train_cells > num_cells:
            raise ConfigError(f"scheduler.train_cells is {self.train_cells}, but there are only {num_cells} cells")
        if self.train_cells == num_cells and standalone == 0:
            if self.moves == "static":
                raise ConfigError("a static split needs a rollout side: train_cells < cells, or standalone slots")
            if self.switch_ratio < 1:
                raise ConfigError("a pool of all cells leaves nobody to finish the step: switch_ratio must be 1")


_PRESETS: dict[str, dict[str, Any]] = {
    # The paper's rule: waterlevel, readiness of the core, growing training prefix until the burst's end.
    "paper": {},
    # Ours; why each number is what it is: docs/scheduling.md.
    "gyre": {
        "max_staleness": 1,
        "in_flight_extra": None,
        "readiness": 0.1,
        "hold_s": 0.0,
        "backlog_s": None,
        "starve_s": None,
        "stay_trips": 5.0,
        "release_at_burst_end": False,
        "yield_to_rollout": True,
        "look_ahead": True,
    },
    "step-switch": {"moves": "pool", "hold_s": 0.0},
    "async": {"moves": "static", "hold_s": 0.0},
    "colocate": {"moves": "barrier", "readiness": 1.0, "hold_s": 0.0, "streaming": False},
}

PRESETS = tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> PolicyConfig:
    """The named preset, with some fields replaced.

    Raises:
        ConfigError: an unknown preset or field, or a value out of range.
    """
    return from_mapping({"preset": name, **overrides})


def from_mapping(table: Mapping[str, Any]) -> PolicyConfig:
    """Read a TOML table: the key `preset` (default `gyre`) and any field of `PolicyConfig`. `inf` is TOML's
    own.

    Raises:
        ConfigError: an unknown preset or field, or a value out of range or of the wrong type.
    """
    fields = dict(table)
    name = fields.pop("preset", "gyre")
    if name not in _PRESETS:
        raise ConfigError(f"unknown scheduler preset {name!r}: one of {', '.join(_PRESETS)}")
    try:
        return msgspec.convert({**_PRESETS[name], **fields}, PolicyConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"scheduler: {error}") from error
