"""Workloads: how long executions take. Fitted distributions, or recorded executions drawn again by whole
groups."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import msgspec

from gyre_sdk.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """One execution that nobody cuts short."""

    virtual_s: float
    """Wall-clock at the reference load, s (see `costs`)."""
    tokens: float = 0.0
    """Unique trained tokens; 0 = unknown."""


class Workload(Protocol):
    """A source of groups. Called in order of dispatch, so the n-th group is the same under every
    scheduler."""

    def group(self, rng: random.Random, size: int) -> list[Sample]:
        """The executions of the next group."""
        ...


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """D = median * exp(sigma * z). A share of the variance of log D belongs to the task and is common to its
    group."""

    median_s: float
    sigma: float
    task_share: float = 0.0
    tokens_per_s: float = 0.0
    """Unique trained tokens per virtual second; 0 = unknown."""

    def __post_init__(self) -> None:
        if not self.median_s > 0 or self.sigma < 0 or not 0 <= self.task_share <= 1:
            raise ConfigError("workload lognormal: need median_s > 0, sigma >= 0 and 0 <= task_share <= 1")

    def group(self, rng: random.Random, size: int) -> list[Sample]:
        """`size` draws around one task's own median."""
        common = self.sigma * math.sqrt(self.task_share) * rng.gauss(0, 1) if self.task_share else 0.0
        own = self.sigma * math.sqrt(1 - self.task_share)
        draws = [self.median_s * math.exp(common + own * rng.gauss(0, 1)) for _ in range(size)]
        return [Sample(d, d * self.tokens_per_s) for d in draws]

    def mean_s(self, timeout_s: float = math.inf) -> float:
        """E[min(D, timeout)]."""
        full = self.median_s * math.exp(self.sigma**2 / 2)
        if math.isinf(timeout_s) or self.sigma == 0:
            return min(full, timeout_s)
        z = (math.log(timeout_s / self.median_s)) / self.sigma
        cdf = NormalDist().cdf
        return full * cdf(z - self.sigma) + timeout_s * (1 - cdf(z))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Each group comes from one component, drawn by weight (easy and hard task families, say)."""

    parts: tuple[tuple[float, LogNormal], ...]

    def __post_init__(self) -> None:
        if not self.parts or any(w < 0 for w, _ in self.parts) or not sum(w for w, _ in self.parts) > 0:
            raise ConfigError("workload mixture: need components with weights >= 0, one of them positive")

    def group(self, rng: random.Random, size: int) -> list[Sample]:
        """One component's group."""
        (part,) = rng.choices([p for _, p in self.parts], [w for w, _ in self.parts])
        return part.group(rng, size)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded groups, drawn again with replacement; a group of another size is filled by drawing from its
    own members."""

    groups: tuple[tuple[Sample, ...], ...]

    def __post_init__(self) -> None:
        if not self.groups or any(not g for g in self.groups):
            raise ConfigError("workload trace: no recorded executions")

    def group(self, rng: random.Random, size: int) -> list[Sample]:
        """One recorded group."""
        group = rng.choice(self.groups)
        return list(group) if len(group) == size else rng.choices(group, k=size)


def lognormal_from_tail(x1_s: float, p1: float, x2_s: float, p2: float) -> tuple[float, float]:
    """(median, sigma) of the lognormal with P(D > x1) = p1 and P(D > x2) = p2.

    sigma = (ln x2 - ln x1) / (z2 - z1), mu = ln x1 - z1 * sigma, with z = Phi^-1(1 - p).
    """
    if not (0 < p2 < p1 < 1 and 0 < x1_s < x2_s):
        raise ConfigError("need 0 < x1 < x2 and 1 > p1 > p2 > 0")
    z1, z2 = (NormalDist().inv_cdf(1 - p) for p in (p1, p2))
    sigma = (math.log(x2_s) - math.log(x1_s)) / (z2 - z1)
    return math.exp(math.log(x1_s) - z1 * sigma), sigma


def fit_lognormal(durations_s: Sequence[float], timed_out: Sequence[bool]) -> LogNormal:
    """Maximum-likelihood lognormal with the timed-out executions right-censored at their recorded duration
    (EM).

    Each round replaces a censored log-duration c by its conditional mean under the current fit,
    mu + sigma * h with h = phi(a) / (1 - Phi(a)) and a = (c - mu) / sigma, and its square likewise.
    """
    logs = [math.log(max(d, 1e-3)) for d in durations_s]
    if len(logs) < 2:
        raise ConfigError("need at least two executions to fit a distribution")
    norm = NormalDist()
    mu = sum(logs) / len(logs)
    sigma = max(math.sqrt(sum((x - mu) ** 2 for x in logs) / len(logs)), 1e-6)
    for _ in range(200):
        first = second = 0.0
        for x, cut in zip(logs, timed_out, strict=True):
            if not cut:
                first += x
                second += x * x
                continue
            a = (x - mu) / sigma
            hazard = norm.pdf(a) / max(1 - norm.cdf(a), 1e-12)
            first += mu + sigma * hazard
            second += mu * mu + sigma * sigma * (1 + a * hazard) + 2 * mu * sigma * hazard
        new_mu = first / len(logs)
        new_sigma = max(math.sqrt(max(second / len(logs) - new_mu**2, 0.0)), 1e-6)
        done = abs(new_mu - mu) + abs(new_sigma - sigma) < 1e-7
        mu, sigma = new_mu, new_sigma
        if done:
            break
    return LogNormal(math.exp(mu), sigma)
