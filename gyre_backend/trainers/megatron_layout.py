"""What a Hugging Face config says about a Megatron run: shapes, rotary frequencies, what must be refused.

Needs no megatron-core, so that a user's mistake is found before any rank starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from gyre_backend.errors import UnsupportedError
from gyre_backend.tree.cost import CostModel

MODEL_TYPES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")


def refuse(hf: Any, *, tp: int, pp: int) -> None:
    """Raise UnsupportedError, naming the setting, for anything this model can't compute exactly."""
    if hf.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"model_type {hf.model_type!r} has no Megatron layout here; supported: {', '.join(MODEL_TYPES)} "
            "(the hf trainer takes any transformers causal LM)"
        )
    if getattr(hf, "attention_dropout", 0.0):
        raise UnsupportedError(f"attention_dropout = {hf.attention_dropout}: a tree can't reproduce dropout; set 0")
    if getattr(hf, "use_sliding_window", False) or "sliding_attention" in (getattr(hf, "layer_types", None) or ()):
        raise UnsupportedError("use_sliding_window: sliding windows are not supported in tree training")
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
    if hf.model_type == "qwen3_moe":
        if getattr(hf, "output_router_logits", False):
            raise UnsupportedError("output_router_logits = true adds the router's aux loss, which counts unique tokens")
        if tp > 1:
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


def padded_vocab(hf: Any, tp: int) -> int:
    """Vocabulary rows including padding: the smallest multiple of `tp`."""
    return -(-int(hf.vocab_size) // tp) * tp


def cost_model(hf: Any, shapes: Mapping[str, tuple[int, ...]]) -> CostModel:
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
