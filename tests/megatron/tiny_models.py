"""Tiny random models on disk, as Hugging Face folders, and ready-made forests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from forests import VOCABULARY, random_paths

from gyre_backend.tree.plan import TreePlan, build_plan

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(kind: str, **changes: Any) -> Any:
    import transformers as t

    kinds = {
        "llama": lambda: t.LlamaConfig(**BASE | {"tie_word_embeddings": True} | changes),
        "llama3": lambda: t.LlamaConfig(**BASE | {"rope_parameters": LLAMA3_ROPE} | changes),
        "qwen2": lambda: t.Qwen2Config(**BASE | changes),
        "qwen3": lambda: t.Qwen3Config(**BASE | {"head_dim": 16, "tie_word_embeddings": True} | changes),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **BASE
            | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            | {"norm_topk_prob": True, "mlp_only_layers": [0]}
            | changes
        ),
    }
    return kinds[kind]()


def save_model(folder: Path, kind: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **changes: Any) -> Path:
    """A model of random weights, none of them at its initial 0 or 1, in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def forest(seed: int = 3, **options: Any) -> TreePlan:
    """A plan with several executions, branch points and edges; other seeds give other shapes."""
    settings = {"executions": 3, "branches": 5, "longest": 7} | options
    return build_plan(*random_paths(seed, **settings))


def relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of any tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[k] - wanted[k]).norm() / wanted[k].norm().clamp_min(1e-30)) for k in wanted)
