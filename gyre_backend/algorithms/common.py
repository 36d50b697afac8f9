"""Settings and terms that the losses share: off-policy correction, KL to a reference, metrics.

Policy versions: a trajectory may hold tokens of several versions (the weights moved while it was being
sampled). Each edge carries the logprob and the version of its own token, so every correction here is per edge
and needs no per-trajectory version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gyre_backend.algorithms.batch import EdgeBatch
from gyre_backend.errors import UnsupportedError

_LOG_RATIO_LIMIT = 20.0
"""exp() of more than this says nothing and overflows float32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """How a loss treats tokens that another policy version, or another engine's arithmetic, sampled.

    `proximal = "sampler"`: the ratio is pi / pi_sampler, as in PPO.
    `proximal = "step"` (decoupled PPO, arXiv 2505.24298): the ratio is pi / pi_step, where pi_step is the
    policy at the step's weights, and each edge is weighed by the importance weight pi_step / pi_sampler.
    Weights are frozen within a step, so pi_step's logprob is this very forward's, without its gradient: it
    costs no second forward.
    """

    proximal: str = "sampler"
    importance: str = "none"
    """of w = pi_step / pi_sampler: none | truncate (min(w, cap), arXiv 2505.24034) | mask (0 outside [floor,
    cap])"""
    importance_cap: float = 2.0
    importance_floor: float = 0.0
    max_staleness: int = -1
    """tokens sampled more than this many versions ago get weight 0; -1 keeps all"""
    kl: float = 0.0
    """coefficient of KL(policy || reference), the k3 estimate of every edge; 0 turns it off"""

    def __post_init__(self) -> None:
        if self.proximal not in ("sampler", "step"):
            raise UnsupportedError(f"algorithm.proximal = {self.proximal!r}: wanted sampler or step")
        if self.importance not in ("none", "truncate", "mask"):
            raise UnsupportedError(f"algorithm.importance = {self.importance!r}: wanted none, truncate or mask")
        if not 0 <= self.importance_floor <= self.importance_cap:
            raise UnsupportedError("algorithm.importance_floor must be in [0, importance_cap]")


def log_ratio(batch: EdgeBatch, settings: OffPolicy) -> torch.Tensor:
    """[E] log(pi / pi_proximal), clamped so that its exp is finite."""
    base = batch.logp.detach() if settings.proximal == "step" else batch.old_logp
    return (batch.logp - base).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def importance_weight(batch: EdgeBatch, settings: OffPolicy) -> torch.Tensor:
    """[E] correction for the sampler's policy, without gradient; 0 drops the edge."""
    weight = torch.ones_like(batch.old_logp)
    if settings.importance != "none":
        raw = (batch.logp.detach() - batch.old_logp).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
        if settings.importance == "truncate":
            weight = raw.clamp(max=settings.importance_cap)
        else:
            inside = (raw >= settings.importance_floor) & (raw <= settings.importance_cap)
            weight = raw * inside
    if settings.max_staleness >= 0:
        weight = weight * (batch.staleness <= settings.max_staleness)
    return weight


def kl_term(batch: EdgeBatch, settings: OffPolicy) -> torch.Tensor:
    """[E] coefficient * (exp(d) - d - 1) with d = ref - policy: unbiased, never negative (Schulman's k3)."""
    if settings.kl == 0.0:
        return torch.zeros_like(batch.old_logp)
    if batch.ref_logp is None:
        raise UnsupportedError("algorithm.kl needs a reference policy: set trainer.ref_model")
    d = (batch.ref_logp - batch.logp).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return settings.kl * (d.exp() - d - 1.0)


def total(edge_loss: torch.Tensor, batch: EdgeBatch, settings: OffPolicy) -> torch.Tensor:
    """sum over edges of weight * (importance weight * edge loss + KL)."""
    return (batch.weight * (importance_weight(batch, settings) * edge_loss + kl_term(batch, settings))).sum()


def metrics(batch: EdgeBatch, clipped: torch.Tensor, settings: OffPolicy) -> dict[str, float]:
    """Means over edges. `clipped: bool[E]` are the edges whose gradient the loss cut."""
    if not len(batch.old_logp):
        return {}
    with torch.no_grad():
        gap = batch.logp - batch.old_logp
        ratio = gap.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
        marks = torch.tensor([0.01, 0.5, 0.99], dtype=ratio.dtype, device=ratio.device)
        low, median, high = torch.quantile(_thinned(ratio), marks).tolist()
        weight = importance_weight(batch, settings)
        found = {
            "clip_share": clipped.double().mean(),
            "ratio_mean": ratio.mean(),
            "logp_gap_mean": gap.mean(),
            "logp_gap_abs": gap.abs().mean(),
            "logp_gap_max": gap.abs().max(),
            # k3 of KL(sampler || trainer): what changed between the sampler's distribution and the trainer's
            "sampler_kl": (ratio - gap - 1.0).mean(),
            "importance_mean": weight.mean(),
            "importance_zero_share": (weight == 0).double().mean(),
            "staleness_mean": batch.staleness.mean(),
            "staleness_max": batch.staleness.max(),
            "positive_share": (batch.adv > 0).double().mean(),
        }
        if batch.in_queue is not None:
            found["staleness_in_queue"] = batch.in_queue.mean()
            found["staleness_pre_queue"] = (batch.staleness - batch.in_queue).mean()
        if batch.entropy is not None:
            found["entropy"] = batch.entropy.mean()
        if batch.ref_logp is not None:
            d = batch.ref_logp - batch.logp
            found["ref_kl"] = (d.exp() - d - 1.0).mean()
        values = {name: float(value) for name, value in found.items()}
    return values | {"ratio_p01": low, "ratio_p50": median, "ratio_p99": high}


def _thinned(values: torch.Tensor, limit: int = 1_000_000) -> torch.Tensor:
    """Every n-th value: torch.quantile refuses more than 16 million."""
    return values[:: max(1, len(values) // limit)]
