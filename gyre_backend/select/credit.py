"""Per-token credit: how an execution's advantage is spread over the tokens of a path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from gyre_backend.select.paths import TrainPath

Credit = Callable[[TrainPath, float], np.ndarray]
"""(path, advantage of its execution) -> float64[n], the advantage of each token of the path"""


def by_role(scale: Mapping[str, float]) -> Credit:
    """The advantage times a factor per role, 1 for a role not named."""

    def credit(path: TrainPath, advantage: float) -> np.ndarray:
        return np.full(len(path.token_ids), advantage * scale.get(path.role, 1.0))

    return credit


def discounted(gamma: float) -> Credit:
    """The advantage times gamma^k for the tokens of the k-th call before the path's last one."""

    def credit(path: TrainPath, advantage: float) -> np.ndarray:
        calls = np.unique(path.call[path.call >= 0])
        before_last = len(calls) - 1 - np.searchsorted(calls, path.call)
        return np.where(path.call >= 0, advantage * gamma ** np.maximum(before_last, 0), 0.0)

    return credit


def combined(role_scale: Mapping[str, float], gamma: float) -> Credit | None:
    """Both at once; None when neither changes anything (the advantage of an execution on all of its tokens)."""
    scaled, decayed = by_role(role_scale), discounted(gamma)
    if gamma == 1.0:
        return scaled if any(factor != 1.0 for factor in role_scale.values()) else None

    def credit(path: TrainPath, advantage: float) -> np.ndarray:
        return decayed(path, 1.0) * scaled(path, advantage)

    return credit
