"""How much a plan costs to train, in floating-point operations of one forward and backward.

Formulas: 6 P per token (P weights of the linear layers, 2 P forward and 4 P backward), 12 A d L for attention
(A pairs of query and key, d = heads x head width, L layers), 6 V h per edge for the head (h hidden width). No
embedding, no recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_backend.tree.plan import TreePlan


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs per unit of work."""

    per_token: float
    per_pair: float
    per_edge: float

    @classmethod
    def of_model(cls, model: Any) -> CostModel:
        """From a transformers model."""
        config = model.config.get_text_config()
        embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        linear = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(6.0 * linear, 12.0 * width * config.num_hidden_layers, 6.0 * config.vocab_size * config.hidden_size)

    @classmethod
    def of_sizes(cls, *, parameters: int, width: int, layers: int, vocabulary: int) -> CostModel:
        """From sizes: weights of the linear layers, width, layers, vocabulary."""
        return cls(6.0 * parameters, 12.0 * width * layers, 6.0 * vocabulary * width)


def cost(plan: TreePlan, model: CostModel) -> float:
    """FLOPs of the plan as a tree."""
    return model.per_token * plan.num_tokens + model.per_pair * tree_pairs(plan) + model.per_edge * plan.num_edges


def flat_cost(plan: TreePlan, model: CostModel) -> float:
    """FLOPs of the same paths computed one by one."""
    return model.per_token * plan.flat_tokens + model.per_pair * flat_pairs(plan) + model.per_edge * plan.num_edges


def flop_bound(plan: TreePlan, model: CostModel) -> float:
    """The speed-up over flattening that the operation counts allow."""
    return flat_cost(plan, model) / cost(plan, model)


def tree_pairs(plan: TreePlan) -> float:
    """(query, key) pairs: every token sees its ancestors and itself."""
    return float((plan.pos.astype(np.float64) + 1.0).sum())


def flat_pairs(plan: TreePlan) -> float:
    """The same over the flattened paths: a token counts once per path that holds it."""
    return float((plan.mult * (plan.pos.astype(np.float64) + 1.0)).sum())
