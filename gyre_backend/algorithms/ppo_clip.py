"""PPO's clipped surrogate with group-relative advantages: GRPO (arXiv 2402.03300, eq. 3; PPO: arXiv
1707.06347, eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gyre_backend.algorithms.batch import EdgeBatch, EdgeLoss
from gyre_backend.algorithms.common import OffPolicy, log_ratio, metrics, total


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(OffPolicy):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), mean inside an execution, then mean over
    executions."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """c > 1: for A < 0 the loss is at most -c A (arXiv 1912.09729); 0 turns it off"""

    estimator: ClassVar[str] = "grpo"
    weighting: ClassVar[str] = "execution"
    whole_replies: ClassVar[bool] = False

    def __call__(self, batch: EdgeBatch) -> EdgeLoss:
        ratio = log_ratio(batch, self).exp()
        edge_loss, clipped = clipped_surrogate(ratio, batch.adv, self.clip_low, self.clip_high, self.dual_clip)
        return EdgeLoss(total(edge_loss, batch, self), metrics(batch, clipped, self))


def clipped_surrogate(
    ratio: torch.Tensor, adv: torch.Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """[E] the negated surrogate, and bool[E] where clipping cut its gradient."""
    plain, bounded = ratio * adv, ratio.clamp(1.0 - low, 1.0 + high) * adv
    gain = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if dual > 0.0:
        least = dual * adv
        cut = (adv < 0) & (gain < least)
        gain = torch.where(cut, least, gain)
        clipped = clipped | cut
    return -gain, clipped
