"""Log-probabilities of single tokens from logits whose vocabulary is split over tensor-parallel ranks.

megatron-core's own cross entropy computes in float32 whatever it is given; this one keeps float64, gives the
entropy with it, and skips the padding of the vocabulary.

Legend: C tokens of a chunk, E loss edges, Vp vocabulary rows held by this rank, d hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


class _VocabParallelLogprob(torch.autograd.Function):
    """log p(target) = logit[target] - log sum exp(logits); max, sum and target are reduced over the group."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_CVp: torch.Tensor,
        target_C: torch.Tensor,
        first: int,
        valid: int,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(logits_CVp.dtype, torch.float32)
        x = logits_CVp[:, :valid].to(wide)
        top = x.amax(-1)
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        x = x - top[:, None]
        p = x.exp()
        local = target_C - first
        mine = (local >= 0) & (local < valid)
        column = local.clamp(0, valid - 1)
        picked = x.gather(1, column[:, None])[:, 0] * mine
        sums = _sum(torch.stack((p.sum(-1), picked, (p * x).sum(-1))), group)
        total, chosen, weighted = sums
        p /= total[:, None]
        ctx.save_for_backward(p, column, mine)
        ctx.rows, ctx.dtype = logits_CVp.shape, logits_CVp.dtype
        entropy = total.log() - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        p, column, mine = ctx.saved_tensors
        grad = -p * grads[0][:, None]
        grad.scatter_add_(1, column[:, None], (grads[0] * mine)[:, None])
        if grad.shape != ctx.rows:  # the vocabulary's padding has no gradient
            grad = torch.nn.functional.pad(grad, (0, ctx.rows[1] - grad.shape[1]))
        return grad.to(ctx.dtype), None, None, None, None


def vocab_parallel_logprobs(
    logits_CVp: torch.Tensor, target_C: torch.Tensor, *, vocab_size: int, rank: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each row, in float32 or wider.

    `rank` holds the vocabulary rows [rank * Vp, (rank + 1) * Vp); those from `vocab_size` on are padding. The
    entropy is a metric: it has no gradient.
    """
    width = logits_CVp.shape[1]
    first = rank * width
    valid = min(vocab_size - first, width)
    if valid < 1:
        raise ValueError(f"vocabulary of {vocab_size} leaves rank {rank} with no rows of its own")
    return _VocabParallelLogprob.apply(logits_CVp, target_C, first, valid, group)
