"""Sinks: told by the gateway which logs exist and how far each is on disk. They read the logs themselves, at
their own pace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class RecordSink(Protocol):
    """Called on the event loop; must return at once and never raise."""

    def opened(self, execution: str, log: Path) -> None:
        """An execution's log exists (new, or found again after a restart). Called again for the same one it
        changes nothing.
        """
        ...

    def advanced(self, execution: str, seq: int, offset: int) -> None:
        """All records before `seq` are on disk and end at byte `offset`."""
        ...


class NullSink:
    """Wants nothing."""

    def opened(self, execution: str, log: Path) -> None:
        """Ignored."""

    def advanced(self, execution: str, seq: int, offset: int) -> None:
        """Ignored."""


class TeeSink:
    """Several sinks as one."""

    def __init__(self, *sinks: RecordSink) -> None:
        self.sinks = sinks

    def opened(self, execution: str, log: Path) -> None:
        """Tell all."""
        for sink in self.sinks:
            sink.opened(execution, log)

    def advanced(self, execution: str, seq: int, offset: int) -> None:
        """Tell all."""
        for sink in self.sinks:
            sink.advanced(execution, seq, offset)
