"""An engine's module over a trainer's memory: same parameters, own configuration, no second copy of the
weights.
"""

from __future__ import annotations

from typing import Any

from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers.base import Trainer


def engine_model(trainer: Trainer) -> Any:
    """A transformers model for generation whose parameters are the trainer's own tensors.

    The trainer's module computes trees through its own attention; generation needs the usual causal attention
    with a cache. Optimizer
    steps and pulls write in place, so the engine always computes with what the trainer holds. Raises
    UnsupportedError for a trainer that
    is not one transformers module.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = getattr(trainer, "model", None)
    if not isinstance(source, torch.nn.Module) or not hasattr(source, "config"):
        raise UnsupportedError("engine.kind = 'embedded' needs the hf trainer: only it holds one transformers module")
    config = AutoConfig.for_model(source.config.model_type, **_plain(source.config))
    config.use_cache = True
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=source.dtype)
    buffers = dict(source.named_buffers())
    for name, parameter in source.named_parameters(remove_duplicate=False):
        _assign(empty, name, torch.nn.Parameter(parameter.data, requires_grad=False))
    for name, _ in list(empty.named_buffers()):
        _assign(empty, name, buffers[name].detach().clone())
    empty.tie_weights()
    if getattr(source, "generation_config", None) is not None:
        empty.generation_config = source.generation_config
    return empty.eval()


def _plain(config: Any) -> dict[str, Any]:
    """A model's configuration without what belongs to the trainer's module."""
    values: dict[str, Any] = config.to_dict()
    return {
        k: v for k, v in values.items() if not k.startswith("_") and k not in ("model_type", "dtype", "torch_dtype")
    }


def _assign(model: Any, name: str, value: Any) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)
