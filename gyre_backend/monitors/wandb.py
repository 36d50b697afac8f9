"""Weights & Biases. Needs the extra `wandb`, and an account unless `mode` is "offline"."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from gyre_backend.monitors.base import RunFacts, known_options
from gyre_sdk.errors import ConfigError, MissingExtraError


class WandbMonitor:
    """Options: `mode` (online | offline), `entity`, `tags`. Offline runs lie in RUN/wandb and are sent by `wandb sync`.

    A run that is gone on with keeps its id, so its curve goes on too.
    """

    def __init__(self, facts: RunFacts) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        options = known_options(facts.options, ("mode", "entity", "tags"), "wandb")
        mode = options.get("mode", "online")
        if mode not in ("online", "offline"):
            raise ConfigError(f"monitors.options.wandb.mode: expected online or offline, not {mode!r}")
        facts.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=facts.project,
                name=facts.name,
                id=hashlib.sha256(str(facts.run_dir.resolve()).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(facts.run_dir),
                config=dict(facts.config),
                mode=mode,
                entity=options.get("entity"),
                tags=options.get("tags"),
                settings=wandb.Settings(silent=True, disable_git=True, console="off", x_disable_stats=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"wandb could not start: {error}; log in with `wandb login`, or set mode = 'offline'"
            ) from error

    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        """One line of its history. W&B refuses a step below its last one, so after a rollback only new steps appear."""
        self._run.log({**values, "at": at}, step=number)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
