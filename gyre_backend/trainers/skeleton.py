"""A transformers module over tensors that live elsewhere: no second copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gyre_backend.errors import UnsupportedError


def skeleton(hf: Any, dtype: torch.dtype) -> Any:
    """The model of a config, without memory behind it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf, dtype=dtype)


def module_over(hf: Any, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The model whose parameters *are* `tensors` (named as its own), without gradients, in evaluation mode.

    Raises UnsupportedError where a parameter or buffer of the model has no tensor to stand for it.
    """
    model = skeleton(hf, dtype)
    model.load_state_dict(dict(tensors), assign=True, strict=False)
    model.tie_weights()
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _replace(model, name, _again(module, hf))
    left = [name for name, p in [*model.named_parameters(), *model.named_buffers()] if p.is_meta]
    if left:
        raise UnsupportedError(f"{type(model).__name__}: no tensor stands for {', '.join(left[:5])}")
    return model.requires_grad_(False).eval()


def _again(module: Any, hf: Any) -> Any:
    """Buffers that no checkpoint holds (rotary frequencies) are computed anew by the module's own code."""
    try:
        return type(module)(config=hf)
    except TypeError as error:
        raise UnsupportedError(f"{type(module).__name__} can't be made from its config alone: {error}") from error


def _replace(model: Any, name: str, module: Any) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
