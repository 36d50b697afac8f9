"""The unit that selection hands to the tree: one root-to-leaf path, with an owner for every token it
trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class TrainPath:
    """One selected root-to-leaf path of `n` tokens.

    A token is *trained here* where `call >= 0`; it is context (given, or trained by an earlier path) where
    `call == -1`.
    """

    execution: str
    group: str
    role: str
    leaf: str
    token_ids: np.ndarray
    """int32[n]"""
    call: np.ndarray
    """int32[n]: number of the call that sampled the token and trains it here, or -1"""
    index: np.ndarray
    """int32[n]: position in that call's output, or -1"""
    old_logprobs: np.ndarray
    """float32[n]: the sampler's logprob, NaN where `call == -1`"""
    versions: np.ndarray
    """int32[n]: policy version that sampled the token, -1 where `call == -1`"""

    @property
    def trained(self) -> int:
        """How many tokens enter the loss through this path."""
        return int((self.call >= 0).sum())
