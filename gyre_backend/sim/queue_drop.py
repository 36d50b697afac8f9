"""A reference point outside Gyre: fully asynchronous training with a dropping queue, simulated and by its published formula.

C samples run at all times; a group's age counts from its first sample; finished groups enter a queue of q batches that drops its
oldest on overflow; the trainer takes a batch of B samples whenever it is free and one is there. With rho = rollout rate /
train rate and M = E[longest of a group] / E[length], the formula (Applied Compute, July 2026, through a public note) is

    rho < 1:  E[age] = C * M / B + rho
    rho > 1:  E[age] = C * M / (rho * B) + (2 q + rho - 1) / (2 rho)

Gyre drops nothing and bounds the age instead; this module exists to check ages against something published.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from heapq import heappop, heappush

import msgspec

from gyre_sdk.errors import ConfigError

_SAMPLE, _TRAINED = 0, 1


class QueueDrop(msgspec.Struct, frozen=True, kw_only=True):
    """The system. Lengths are lognormal with mean 1."""

    concurrency: int
    """C, samples."""
    batch: int
    """B, samples; a multiple of `group`."""
    group: int
    """Samples per group."""
    queue: float
    """q, batches."""
    rho: float
    """Rollout rate / train rate."""
    sigma: float

    def __post_init__(self) -> None:
        if self.batch % self.group or min(self.concurrency, self.batch, self.group) < 1:
            raise ConfigError("queue drop: batch must be a multiple of group, and all counts at least 1")
        if self.rho <= 0 or self.rho == 1 or self.queue < 1:
            raise ConfigError("queue drop: need rho > 0, rho != 1 (where no formula holds) and queue >= 1")

    def length(self, rng: random.Random) -> float:
        """One sample's length."""
        return math.exp(self.sigma * rng.gauss(0, 1) - self.sigma**2 / 2)

    def tail(self, rng: random.Random, groups: int = 6_000) -> float:
        """M, by drawing."""
        return statistics.fmean(max(self.length(rng) for _ in range(self.group)) for _ in range(groups))

    def formula(self, seed: int = 0) -> float:
        """E[age] by the published formula, versions."""
        in_flight = self.concurrency * self.tail(random.Random(seed)) / self.batch
        if self.rho < 1:
            return in_flight + self.rho
        return in_flight / self.rho + (2 * self.queue + self.rho - 1) / (2 * self.rho)

    def simulate(self, seed: int = 0, steps: int = 400, warmup: int = 100) -> float:
        """E[age] over the steps after the warm-up, versions."""
        return _Run(self, seed).mean_age(steps, warmup)


class _Run:
    def __init__(self, system: QueueDrop, seed: int) -> None:
        self.system = system
        self.rng = random.Random(seed)
        self.heap: list[tuple[float, int, int]] = []
        self.left: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.group, self.places = 0, 0
        self.version = 0
        self.queue: deque[int] = deque()
        self.training = False
        for _ in range(system.concurrency):
            self._start(0.0)

    def _start(self, now: float) -> None:
        if self.places == 0:
            self.group += 1
            self.places = self.system.group
            self.left[self.group] = self.system.group
            self.born[self.group] = self.version
        self.places -= 1
        heappush(self.heap, (now + self.system.length(self.rng), _SAMPLE, self.group))

    def _sample_done(self, now: float, group: int) -> None:
        self.left[group] -= 1
        if self.left[group] == 0:
            del self.left[group]
            self.queue.append(self.born.pop(group))
            if len(self.queue) * self.system.group > self.system.queue * self.system.batch:
                self.queue.popleft()
        self._start(now)

    def mean_age(self, steps: int, warmup: int) -> float:
        system = self.system
        needed = system.batch // system.group
        train_s = system.rho * system.batch / system.concurrency
        ages: list[int] = []
        while self.version < steps:
            now, kind, group = heappop(self.heap)
            if kind == _SAMPLE:
                self._sample_done(now, group)
            else:
                self.version += 1
                self.training = False
            if not self.training and len(self.queue) >= needed:
                born = [self.queue.popleft() for _ in range(needed)]
                if self.version >= warmup:
                    ages += [self.version - version for version in born]
                self.training = True
                heappush(self.heap, (now + train_s, _TRAINED, 0))
        return statistics.fmean(ages)
