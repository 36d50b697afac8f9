"""Small random models of several families, saved as folders once per session."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forests import VOCABULARY

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _SIZES),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 16}),
    "gpt2": ("GPT2", _GPT2),
    "qwen3_moe": (
        "Qwen3Moe",
        _SIZES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "granite": ("Granite", _SIZES | {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_dir("llama", **changes)`: a folder with a random model of that family."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            name, sizes = FAMILIES[family]
            config = getattr(transformers, f"{name}Config")(**(sizes | changes))
            kind = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
            torch.manual_seed(0)
            folder = made[key] = tmp_path_factory.mktemp(family)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind(config).save_pretrained(folder)
        return made[key]

    return make
