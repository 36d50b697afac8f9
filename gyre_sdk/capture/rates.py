"""A bound on requests per second: a harness in a loop, or somebody who guesses keys, must not starve the others."""

from __future__ import annotations

import time

from gyre_sdk.errors import RequestError


class RateLimitedError(RequestError):
    """429; `retry_after` seconds from now there is room."""

    status = 429

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, code="rate_limited")
        self.retry_after = retry_after


class Bucket:
    """`burst` requests at once, and `per_s` more every second (token bucket)."""

    def __init__(self, per_s: float, burst: int) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left = float(burst)
        self._at = time.monotonic()

    def take(self, who: str) -> None:
        """Count a request. Raises RateLimitedError when there are too many."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at) * self.per_s)
        self._at = now
        if self._left < 1:
            wait = (1 - self._left) / self.per_s
            raise RateLimitedError(f"{who}: more than {self.per_s:g} requests per second", wait)
        self._left -= 1
