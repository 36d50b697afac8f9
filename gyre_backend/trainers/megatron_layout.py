"""What a Hugging Face config says about a Megatron run: shapes, rotary frequencies, what must be refused.

Needs no megatron-core, so that a user's mistake is found before any rank starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers import hf_model
from gyre_backend.tree.cost import CostModel

MODEL_TYPES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a Hugging Face config a rank needs, under its names there: ranks then need no transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    inv_freq: torch.Tensor
    """float32[head_dim / 2], rotary frequencies"""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    norm_topk_prob: bool = True

    @classmethod
    def of(cls, hf: Any) -> Shape:
        """Raises UnsupportedError for rotary embeddings that the Megatron model doesn't compute."""
        held = {field.name: getattr(hf, field.name) for field in fields(cls) if hasattr(hf, field.name)}
        held |= {"head_dim": head_width(hf), "inv_freq": rotary_frequencies(hf)}
        held |= {"mlp_only_layers": tuple(getattr(hf, "mlp_only_layers", None) or ())}
        return cls(**held)

    def sparse(self, layer: int) -> bool:
        """True if the layer's feed-forward is experts."""
        turn = (layer + 1) % self.decoder_sparse_step == 0
        return self.model_type == "qwen3_moe" and layer not in self.mlp_only_layers and turn


def refuse(hf: Any, *, tp: int, pp: int) -> None:
    """Raise UnsupportedError, naming the setting, for anything this model can't compute exactly."""
    if hf.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"model_type {hf.model_type!r} has no Megatron layout here; supported: {', '.join(MODEL_TYPES)} "
            "(the hf trainer takes any transformers causal LM)"
        )
    hf_model.refuse(hf)
    if hf.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act = {hf.hidden_act!r}: only silu")
    if getattr(hf, "mlp_bias", False):
        raise UnsupportedError("mlp_bias = true has no Megatron layout here")
    if getattr(hf, "attention_bias", False):
        raise UnsupportedError("attention_bias = true (it puts a bias on o_proj) has no Megatron layout here")
    for what, size, parts in (
        ("num_attention_heads", hf.num_attention_heads, tp),
        ("num_key_value_heads", hf.num_key_value_heads, tp),
        ("intermediate_size", hf.intermediate_size, tp),
        ("num_hidden_layers", hf.num_hidden_layers, pp),
    ):
        if size % parts:
            raise UnsupportedError(f"{what} = {size} can't be split over {parts} ranks")
    if hf.model_type == "qwen3_moe" and tp > 1:
        raise UnsupportedError(
            "tp > 1 with experts needs sequence parallelism, which a tree plan doesn't have; use tp = 1"
        )


def rotary_frequencies(hf: Any) -> torch.Tensor:
    """float32[D / 2]: transformers' own frequencies for this config (default, linear or llama3)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(getattr(hf, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedError(f"rope_type = {kind!r}: the Megatron trainer knows default, linear and llama3")
    if kind == "default":
        width = head_width(hf)
        theta = float(rope.get("rope_theta", getattr(hf, "rope_theta", 10000.0)))
        steps = torch.arange(0, width, 2, dtype=torch.int64).to(dtype=torch.float)
        return 1.0 / (theta ** (steps / width))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    if factor != 1.0:
        raise UnsupportedError(
            f"rope_type = {kind!r} scales attention by {factor}, which Megatron's rotary has no place for"
        )
    return inv_freq.float()


def head_width(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def padded_vocab(hf: Shape, tp: int) -> int:
    """Vocabulary rows including padding: the smallest multiple of `tp`."""
    return -(-int(hf.vocab_size) // tp) * tp


def cost_model(hf: Shape, shapes: Mapping[str, tuple[int, ...]]) -> CostModel:
    """What a token costs, from the tensors' shapes. Of the experts, a token's own share counts."""
    active = hf.num_experts_per_tok / hf.num_experts if hf.model_type == "qwen3_moe" else 1.0
    linear = sum(
        math.prod(shape) * (active if ".experts." in name else 1.0)
        for name, shape in shapes.items()
        if len(shape) > 1 and "embed_tokens" not in name and "lm_head" not in name
    )
    return CostModel(
        per_token=6.0 * linear,
        per_pair=12.0 * head_width(hf) * hf.num_attention_heads * hf.num_hidden_layers,
        per_edge=6.0 * hf.vocab_size * hf.hidden_size,
    )
