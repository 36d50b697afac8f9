"""What a loss sees: tensors with one entry per edge (a sampled token), and nothing of the model or the tree.

Legend: E edges of the micro-step, X executions in it, S sampled replies (execution, call) in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import numpy as np
import torch

from gyre_backend.tree.plan import TreePlan


@dataclass(frozen=True, slots=True, eq=False)
class EdgeBatch:
    """Per-edge tensors of one micro-step. Only `logp` carries a gradient."""

    logp: torch.Tensor
    """[E] trainer's log-probability of the sampled token, at the step's weights"""
    old_logp: torch.Tensor
    """[E] sampler's log-probability"""
    adv: torch.Tensor
    """[E] advantage"""
    weight: torch.Tensor
    """[E] what the edge's loss is multiplied by before it is summed (1/T_e by default)"""
    execution: torch.Tensor
    """int64[E], in [0, X)"""
    reply: torch.Tensor
    """int64[E], in [0, S)"""
    staleness: torch.Tensor
    """[E] version trained at - version sampled with, >= 0"""
    in_queue: torch.Tensor | None = None
    """[E] the part of the staleness after the execution's last token was sampled; the rest arose while it
    ran"""
    entropy: torch.Tensor | None = None
    """[E] of the trainer's distribution at the source, without gradient"""
    ref_logp: torch.Tensor | None = None
    """[E] reference policy's log-probability, for KL terms"""

    @classmethod
    def of(
        cls,
        plan: TreePlan,
        logp: torch.Tensor,
        *,
        version: int,
        entropy: torch.Tensor | None = None,
        ref_logp: torch.Tensor | None = None,
    ) -> EdgeBatch:
        """The plan's edges with the trainer's `logp: [E]`; `version` is the policy version of the weights."""

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.tensor(array, dtype=logp.dtype, device=logp.device)

        latest = np.full(len(plan.executions), -1, np.int64)
        np.maximum.at(latest, plan.edge_exec, plan.edge_version)
        keys = np.stack([plan.edge_exec, plan.edge_call])
        reply = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        return cls(
            logp=logp,
            old_logp=tensor(plan.edge_old_logp),
            adv=tensor(plan.edge_adv),
            weight=tensor(plan.edge_w),
            execution=torch.tensor(plan.edge_exec, dtype=torch.int64, device=logp.device),
            reply=torch.tensor(reply, dtype=torch.int64, device=logp.device),
            staleness=tensor(np.maximum(version - plan.edge_version, 0)),
            in_queue=tensor(np.maximum(version - latest[plan.edge_exec], 0)),
            entropy=entropy,
            ref_logp=ref_logp,
        )

    def part(self, index: torch.Tensor, logp: torch.Tensor) -> EdgeBatch:
        """The edges at `index: int64[e]`, with a logprob of their own."""

        def pick(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[index]

        columns = {field.name: pick(getattr(self, field.name)) for field in fields(self)}
        return replace(self, **(columns | {"logp": logp}))


@dataclass(frozen=True, slots=True, eq=False)
class EdgeLoss:
    """`loss` is the scalar to differentiate: sum over edges of weight * edge loss."""

    loss: torch.Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    """means over the batch's edges, unless the name says otherwise"""


class Algorithm(Protocol):
    """A loss over edges. Pure: the same batch gives the same loss."""

    @property
    def estimator(self) -> str:
        """Name of the advantage estimator it is defined with (`gyre_backend.select.advantages`)."""
        ...

    @property
    def weighting(self) -> str:
        """How edges are weighed (`gyre_backend.tree.plan.build_plan`)."""
        ...

    @property
    def whole_replies(self) -> bool:
        """True if all edges of a reply must be in one micro-step."""
        ...

    def __call__(self, batch: EdgeBatch) -> EdgeLoss:
        """The micro-step's loss."""
        ...
