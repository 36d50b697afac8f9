"""Weights of a Hugging Face folder, put into a model in place: all of them or none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from gyre_backend.errors import WeightsError


def load_in_place(model: Any, folder: Path) -> None:
    """Overwrite every parameter. Raises WeightsError, and nothing has changed, when the folder does not fit the model."""
    state = _read(folder)
    copy_in_place(model, state, str(folder))


def copy_in_place(model: Any, state: dict[str, Any], source: str) -> None:
    """Overwrite every parameter from a state dict. Raises WeightsError, and nothing has changed, when it does not fit."""
    import torch

    targets = dict(model.named_parameters(remove_duplicate=False))
    tied = {name for name in targets if name not in dict(model.named_parameters())}
    missing = sorted(set(targets) - set(state) - tied)
    if missing:
        raise WeightsError(f"{source} lacks {missing[0]} (and {len(missing) - 1} more)")
    for name, target in targets.items():
        if name in state and state[name].shape != target.shape:
            raise WeightsError(f"{name} is {tuple(state[name].shape)} in {source}, {tuple(target.shape)} in the model")
    with torch.no_grad():
        for name, target in targets.items():
            if name in state:
                target.data.copy_(state[name])


def _read(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise WeightsError(f"{folder} holds no safetensors files")
    state: dict[str, Any] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} can't be read: {error}") from error
    return state


def checksum(model: Any) -> str:
    """BLAKE2b over names, types, shapes and bytes of all parameters, in order of name."""
    import torch

    total = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        total.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        total.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
