"""DAPO (arXiv 2503.14476, eq. 8): clip-higher, and every token of a group weighs the same.

Its other two parts live elsewhere: groups of equal rewards are dropped by selection (`equal_rewards =
"skip"`), and overlong replies are shaped by the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gyre_backend.algorithms.ppo_clip import GRPO


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(GRPO):
    """The clipped surrogate with clip_high > clip_low, weighed by token."""

    clip_low: float = 0.2
    clip_high: float = 0.28

    weighting: ClassVar[str] = "token"
