"""All monitors of a run behind one thread, so that neither a slow disk nor a slow network holds up training."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gyre_backend.monitors.base import Monitor, flat_numbers

log = logging.getLogger(__name__)

QUEUED = 1000
"""Steps that may wait; one more is dropped, and counted (`metrics.jsonl` has it)."""
CLOSE_S = 20.0
"""How long a run's end waits for monitors."""


class _Step(NamedTuple):
    number: int
    at: float
    values: dict[str, float]


class FanOut:
    """Hands every step to every monitor. A monitor that fails is told of once in the log and left out from then on."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self._monitors = dict(monitors)
        self._queue: queue.Queue[_Step | None] = queue.Queue(QUEUED)
        self.dropped = 0
        self.failed: dict[str, str] = {}
        """Monitor -> what it raised."""
        self._thread = threading.Thread(target=self._work, name="monitors", daemon=True)
        if self._monitors:
            self._thread.start()

    def step(self, row: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl`. Never blocks, never raises."""
        if not self._monitors:
            return
        try:
            self._queue.put_nowait(_Step(int(row.get("step", 0)), float(row.get("at", time.time())), flat_numbers(row)))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = CLOSE_S) -> None:
        """Write what is queued and end the monitors; gives up after `timeout` seconds. May be called again."""
        if not self._thread.is_alive():
            return
        begun = time.monotonic()
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            log.warning("monitors are stuck; the metrics are in metrics.jsonl")
            return
        self._thread.join(max(0.0, timeout - (time.monotonic() - begun)))
        if self._thread.is_alive():
            log.warning("monitors did not end within %.0f s; the metrics are in metrics.jsonl", timeout)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            for name, monitor in list(self._monitors.items()):
                try:
                    monitor.step(item.number, item.at, item.values)
                except Exception as error:  # boundary: another project's library must not end a training run
                    self._leave_out(name, error)
        for name, monitor in list(self._monitors.items()):
            try:
                monitor.close()
            except Exception as error:  # boundary: as above
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self._monitors.pop(name, None)
        self.failed[name] = f"{type(error).__name__}: {error}"
        log.warning("monitor %s is left out from now on: %s", name, self.failed[name])
