"""Dr.GRPO (arXiv 2503.20783): no division by the group's standard deviation, none by the reply's own
length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gyre_backend.algorithms.ppo_clip import GRPO
from gyre_backend.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(GRPO):
    """The clipped surrogate, summed over an execution's tokens and divided by one constant, the token
    budget."""

    token_budget: int = 4096
    """tokens; the constant that replaces T_e (the paper: the generation budget). It scales the learning
    rate."""

    estimator: ClassVar[str] = "dr_grpo"

    def __post_init__(self) -> None:
        GRPO.__post_init__(self)  # slots rebuild the class: super() would look in the old one
        if self.token_budget < 1:
            raise UnsupportedError("algorithm.token_budget must be at least 1")

    @property
    def weighting(self) -> str:  # type: ignore[override]
        return str(self.token_budget)
