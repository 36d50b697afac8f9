"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5): the importance weight is clipped and detached, no token's
gradient is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gyre_backend.algorithms.batch import EdgeBatch, EdgeLoss
from gyre_backend.algorithms.common import OffPolicy, log_ratio, metrics, total


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(OffPolicy):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi."""

    clip_low: float = 1.0
    """1 means no lower bound, as in the paper"""
    clip_high: float = 4.0

    estimator: ClassVar[str] = "grpo"
    weighting: ClassVar[str] = "token"
    whole_replies: ClassVar[bool] = False

    def __call__(self, batch: EdgeBatch) -> EdgeLoss:
        ratio = log_ratio(batch, self).detach().exp()
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return EdgeLoss(total(-bounded * batch.adv * batch.logp, batch, self), metrics(batch, bounded != ratio, self))
