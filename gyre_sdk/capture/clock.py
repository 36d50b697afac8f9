"""Times of records: seconds since the epoch that never run backwards, whatever happens to the machine's clock."""

from __future__ import annotations

import time


class Clock:
    """Reads the machine's clock once and counts on from there: a jump of it changes no record's time.

    not_before: time of the last record of an earlier process; that one's clock may have been ahead.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._start = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """Now."""
        return self._start + time.monotonic()
