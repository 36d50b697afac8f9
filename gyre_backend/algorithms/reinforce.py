"""REINFORCE with the advantage of REINFORCE++ (arXiv 2501.03262): -A log pi, unclipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gyre_backend.algorithms.batch import EdgeBatch, EdgeLoss
from gyre_backend.algorithms.common import OffPolicy, metrics, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(OffPolicy):
    """Off-policy tokens are corrected by `importance` alone."""

    estimator: ClassVar[str] = "reinforce++"
    weighting: ClassVar[str] = "token"
    whole_replies: ClassVar[bool] = False

    def __call__(self, batch: EdgeBatch) -> EdgeLoss:
        unclipped = torch.zeros_like(batch.adv, dtype=torch.bool)
        return EdgeLoss(total(-batch.adv * batch.logp, batch, self), metrics(batch, unclipped, self))
