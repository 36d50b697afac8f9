"""TensorBoard: event files in RUN/tensorboard. Needs the extra `tensorboard`; neither TensorFlow nor torch is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre_backend.monitors.base import RunFacts, known_options
from gyre_sdk.errors import MissingExtraError

FLUSH_S = 10
"""Seconds between two flushes to disk."""


class TensorBoardMonitor:
    """Scalars by name. Option `folder`: where to write instead of RUN/tensorboard (one sub-folder per run is usual)."""

    def __init__(self, facts: RunFacts) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard") from error
        options = known_options(facts.options, ("folder",), "tensorboard")
        self.folder = Path(str(options.get("folder", facts.run_dir / "tensorboard")))
        self._writer: Any = EventFileWriter(str(self.folder), flush_secs=FLUSH_S)
        self._last: int | None = None

    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        """One event with all scalars. A number that is not above the last one makes TensorBoard forget the later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._last is None or number <= self._last:
            # Of a run that was resumed or rolled back, what was drawn from this step on is drawn anew.
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=at, step=number, session_log=log))
        self._last = number
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=at, step=number, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
