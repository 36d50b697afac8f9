"""GSPO (arXiv 2507.18071, eq. 5-7): one ratio per reply, the geometric mean of its tokens' ratios.

The sequence is one sampled reply (execution, call): the unit the policy was asked for. A reply of which
selection trains a part (the rest was trained through another path of the same micro-step) is still one
sequence, because edges are grouped by their key. All of a reply's edges must be in one micro-step:
`whole_replies` tells the splitter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gyre_backend.algorithms.batch import EdgeBatch, EdgeLoss
from gyre_backend.algorithms.common import OffPolicy, log_ratio, metrics, total
from gyre_backend.algorithms.ppo_clip import clipped_surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(OffPolicy):
    """The clipped surrogate of s = exp(mean of log r over the reply), on each of the reply's edges."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    estimator: ClassVar[str] = "grpo"
    weighting: ClassVar[str] = "execution"
    whole_replies: ClassVar[bool] = True

    def __call__(self, batch: EdgeBatch) -> EdgeLoss:
        log_r = log_ratio(batch, self)
        replies = int(batch.reply.max()) + 1 if len(batch.reply) else 0
        sums = log_r.new_zeros(replies).index_add(0, batch.reply, log_r)
        counts = log_r.new_zeros(replies).index_add(0, batch.reply, torch.ones_like(batch.old_logp))
        ratio = (sums / counts).exp()[batch.reply]
        edge_loss, clipped = clipped_surrogate(ratio, batch.adv, self.clip_low, self.clip_high)
        return EdgeLoss(total(edge_loss, batch, self), metrics(batch, clipped, self))
