"""Group-relative advantages from rewards. Only executions that count are given: valid ones, and placeholders
as reward 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_backend.errors import UnsupportedError

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What a sealed execution counts for."""

    execution: str
    group: str
    reward: float | None
    valid: bool
    placeholder: bool = False

    @property
    def counts(self) -> bool:
        """In the baseline and in N."""
        return self.placeholder or (self.valid and self.reward is not None)

    @property
    def score(self) -> float:
        """The reward; 0 for a placeholder."""
        return 0.0 if self.placeholder or self.reward is None else self.reward


def advantages(results: Sequence[ExecutionResult], estimator: str) -> dict[str, float]:
    """Advantage of every execution that counts; the others are left out of the result and of the baseline.

    `grpo`: (r - mean) / std over the group (arXiv 2402.03300; population std).
    `dr_grpo`: r - mean (arXiv 2503.20783).
    `rloo`: r - mean of the group's others (arXiv 2402.14740); 0 in a group of one.
    `reinforce++`: r - the group's mean, over the std of that over all results given (the baseline variant of
    arXiv 2501.03262). Pass a whole step's results at once to normalise over the batch.

    Raises UnsupportedError for another estimator.
    """
    if estimator not in _ESTIMATORS:
        raise UnsupportedError(f"estimator = {estimator!r}: known estimators are {', '.join(_ESTIMATORS)}")
    counted = [result for result in results if result.counts]
    groups: dict[str, list[ExecutionResult]] = {}
    for result in counted:
        groups.setdefault(result.group, []).append(result)
    found: dict[str, float] = {}
    for members in groups.values():
        scores = np.array([member.score for member in members], np.float64)
        found |= zip((member.execution for member in members), _ESTIMATORS[estimator](scores).tolist())
    if estimator == "reinforce++" and found:
        deviation = float(np.std(list(found.values())))
        found = {execution: value / (deviation + _EPSILON) for execution, value in found.items()}
    return found


def equal_rewards(results: Sequence[ExecutionResult]) -> bool:
    """All executions of the group that count have the same reward: there is nothing to learn from their
    comparison."""
    scores = [result.score for result in results if result.counts]
    return len(scores) == 0 or max(scores) == min(scores)


def _grpo(scores: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = (scores - scores.mean()) / (scores.std() + _EPSILON)
    return scaled


def _centred(scores: np.ndarray) -> np.ndarray:
    centred: np.ndarray = scores - scores.mean()
    return centred


def _rloo(scores: np.ndarray) -> np.ndarray:
    n = len(scores)
    return _centred(scores) * (n / (n - 1)) if n > 1 else np.zeros(n)


_ESTIMATORS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": _grpo,
    "dr_grpo": _centred,
    "rloo": _rloo,
    "reinforce++": _centred,
}
