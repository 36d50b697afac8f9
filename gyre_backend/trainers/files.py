"""Folders on disk: written beside their place, synced, then renamed, so that each is whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gyre_backend.errors import TrainingError

SHARD_BYTES = 2 << 30
_INDEX = "index.json"
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` (and of what was there) when the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for file in [*fresh.rglob("*"), fresh]:
            _sync(file)
        old = path.with_name(f".{path.name}.old-{os.getpid()}")
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Tensors in shards of at most SHARD_BYTES (a larger tensor is a shard of its own), and an index with
    `state`."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = tensor.detach().contiguous()
        held += size
    where: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"shard-{number:05d}.safetensors"
        save_file(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    (folder / _INDEX).write_text(json.dumps({"state": dict(state), "tensors": where}, indent=1))


def load_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `save_tensors` wrote. Raises TrainingError if the folder is not a checkpoint."""
    from safetensors.torch import load_file

    try:
        index = json.loads((folder / _INDEX).read_text())
        files, state = sorted(set(index["tensors"].values())), dict(index["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{folder} is not a checkpoint: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(folder / file)
    return tensors, state


def copy_companions(source: Path, target: Path) -> None:
    """Copy what a model folder holds besides weights (tokenizer, templates, generation config), unless it is
    there already."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
