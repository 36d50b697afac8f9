"""Monitors by name, as `[monitors] use` lists them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_backend.monitors.base import Monitor, RunFacts
from gyre_backend.monitors.fan_out import FanOut
from gyre_backend.monitors.tensorboard import TensorBoardMonitor
from gyre_backend.monitors.trackio import TrackioMonitor
from gyre_backend.monitors.wandb import WandbMonitor
from gyre_sdk.errors import ConfigError

MONITORS: dict[str, Callable[[RunFacts], Monitor]] = {
    "tensorboard": TensorBoardMonitor,
    "wandb": WandbMonitor,
    "trackio": TrackioMonitor,
}


def make_monitors(
    use: Sequence[str],
    run_dir: Path,
    *,
    project: str = "gyre",
    name: str = "",
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> FanOut:
    """The monitors that are wanted, started. `use`: names of `MONITORS`, or `package.module:Class` (called with RunFacts).

    Raises ConfigError for an unknown name or option, MissingExtraError when a library is not installed.
    """
    options = options or {}
    if strange := sorted(set(options) - set(use)):
        raise ConfigError(f"monitors.options.{strange[0]}: {strange[0]!r} is not in monitors.use")
    made: dict[str, Monitor] = {}
    for wanted in dict.fromkeys(use):
        facts = RunFacts(run_dir, project, name or run_dir.name, config or {}, options.get(wanted, {}))
        made[wanted] = _factory(wanted)(facts)
    return FanOut(made)


def _factory(name: str) -> Callable[[RunFacts], Monitor]:
    if name in MONITORS:
        return MONITORS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"monitors.use: unknown monitor {name!r}; there are {', '.join(MONITORS)}, or package.module:Class"
        )
    try:
        found: Callable[[RunFacts], Monitor] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"monitors.use: {name!r} can't be imported: {error}") from error
    return found
