"""Losses: pure functions of per-edge tensors, one file each. `make(name, **options)` builds one."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

from gyre_backend.algorithms.batch import Algorithm, EdgeBatch, EdgeLoss
from gyre_backend.errors import UnsupportedError

__all__ = ["NAMES", "Algorithm", "EdgeBatch", "EdgeLoss", "make"]

_WHERE = {
    "grpo": ("ppo_clip", "GRPO"),
    "dapo": ("dapo", "DAPO"),
    "dr_grpo": ("dr_grpo", "DrGRPO"),
    "cispo": ("cispo", "CISPO"),
    "gspo": ("gspo", "GSPO"),
    "reinforce": ("reinforce", "Reinforce"),
}
NAMES = tuple(_WHERE)


def make(name: str, **options: Any) -> Algorithm:
    """The algorithm called `name`. Raises UnsupportedError for an unknown name or option, naming it."""
    if name not in _WHERE:
        raise UnsupportedError(f"algorithm = {name!r}: known algorithms are {', '.join(NAMES)}")
    module, attribute = _WHERE[name]
    kind = getattr(import_module(f"gyre_backend.algorithms.{module}"), attribute)
    known = [option.name for option in fields(kind)]
    for option in options:
        if option not in known:
            raise UnsupportedError(f"algorithm.{option}: {name} has no such setting; it has {', '.join(known)}")
    algorithm: Algorithm = kind(**options)
    return algorithm
