"""trackio: a local dashboard (`trackio show`), with W&B's calls. Needs the extra `trackio`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_backend.monitors.base import RunFacts, known_options
from gyre_sdk.errors import MissingExtraError


class TrackioMonitor:
    """Writes to trackio's own store on this machine ($TRACKIO_DIR). Option `space_id`: a Hugging Face Space to send to."""

    def __init__(self, facts: RunFacts) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingExtraError("trackio", "trackio") from error
        options = known_options(facts.options, ("space_id",), "trackio")
        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=facts.project, name=facts.name, config=dict(facts.config), resume="allow", embed=False, **options
        )

    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        """One line of its history."""
        self._run.log(dict(values), step=number)

    def close(self) -> None:
        """Write what is queued."""
        self._run.finish()
