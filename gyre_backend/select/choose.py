"""Which branches of one execution are trained: the pure core, on plain numbers.

A branch holds, of each call on it, a prefix of that call's output (the whole of it, or what a later context
kept). So which of its sampled tokens are untaken is a matter of one length per call, however long the branch
is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Branch:
    """A root-to-leaf path as selection sees it."""

    leaf: str
    role: str
    extent: Mapping[int, int]
    """call -> n: the path holds the call's output tokens [0, n). Only calls that may be trained are
    listed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A taken branch."""

    branch: int
    """index into the branches given"""
    fresh: Mapping[int, tuple[int, int]]
    """call -> [start, end): the output tokens that this path trains; earlier paths took those before
    `start`"""


def choose(branches: Sequence[Branch], *, roles: Sequence[str], j_max: int | None, seed: Sequence[int]) -> list[Choice]:
    """Take paths: from the first role of `roles` that has untaken sampled tokens, draw a branch with
    probability proportional to its untaken sampled tokens; until nothing is left, or `j_max` paths are taken.

    Branches of a role that is not in `roles` are never taken. Every (call, index) is in at most one choice.
    The result depends on the arguments alone.
    """
    rng = np.random.default_rng(list(seed))
    taken: dict[int, int] = {}
    choices: list[Choice] = []
    classes = [[i for i, branch in enumerate(branches) if branch.role == role] for role in dict.fromkeys(roles)]
    for members in classes:
        while j_max is None or len(choices) < j_max:
            untaken = np.array([_untaken(branches[i], taken) for i in members], np.float64)
            total = untaken.sum()
            if total == 0:
                break
            drawn = int(np.searchsorted(np.cumsum(untaken), rng.random() * total, side="right"))
            branch = branches[members[drawn]]
            fresh = {call: (taken.get(call, 0), n) for call, n in branch.extent.items() if n > taken.get(call, 0)}
            taken |= {call: n for call, (_, n) in fresh.items()}
            choices.append(Choice(members[drawn], fresh))
    return choices


def _untaken(branch: Branch, taken: Mapping[int, int]) -> int:
    return sum(max(0, n - taken.get(call, 0)) for call, n in branch.extent.items())
