"""The protocol of a monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gyre_sdk.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a monitor is told of the run when it is made."""

    run_dir: Path
    project: str
    name: str
    """The run's name; the same after a restart, so that a monitor can go on with it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The backend's configuration, as plain values."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `[monitors.options.NAME]` says; a monitor refuses what it does not know with a ConfigError."""


class Monitor(Protocol):
    """Takes the metrics of steps. All calls come from one thread; what it raises is logged, and ends it alone."""

    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        """Metrics of step `number` (0, 1, 2 ...), which ended at `at` (s since the epoch). After a rollback numbers repeat."""
        ...

    def close(self) -> None:
        """Write what is queued."""
        ...


def flat_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line, those of a table in it as `table/name`; step and time are left out."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{key}": number for key, number in flat_numbers(value).items()})
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "at"):
            flat[name] = float(value)
    return flat


def known_options(options: Mapping[str, Any], known: Sequence[str], monitor: str) -> dict[str, Any]:
    """`options`, when they hold nothing but `known` names. Raises ConfigError."""
    if strange := sorted(set(options) - set(known)):
        raise ConfigError(f"monitors.options.{monitor}.{strange[0]}: unknown; there are {', '.join(known)}")
    return dict(options)
