"""Tree attention by torch's FlexAttention; its block mask is made from segments, never from [U, U].

A key at packed index s is seen by the queries in [s, end of the subtree of s's segment). So a block of keys
is seen by a block of queries exactly when its furthest-reaching key reaches the block's first query, and
wholly when its nearest-reaching key reaches past the block's last.

torch 2.13 has no CPU backward for FlexAttention: on a CPU only the forward runs, and a gradient is refused.
On CUDA the kernel is compiled once per block-mask shape. Not run on a GPU yet.

Legend: U packed tokens, P of them after padding to whole blocks, B blocks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from gyre_backend.errors import UnsupportedError
from gyre_backend.tree.attend import Layout
from gyre_backend.tree.plan import TreePlan

BLOCK: Final = 128


def reach(plan: TreePlan, padded: int) -> np.ndarray:
    """int32[P]: first query index that no longer sees this key. A padding token is seen by itself only."""
    size = len(plan.ids)
    table = np.arange(1, padded + 1, dtype=np.int32)
    table[:size] = np.repeat(plan.seg_sub_end, plan.seg_end - plan.seg_start)
    return table


def blocks_of(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(partly, wholly) visible blocks, bool[B, B] by query block and key block, without any token pair."""
    per_block = table.reshape(-1, BLOCK)
    count = len(per_block)
    first = np.arange(count)[:, None] * BLOCK
    earlier = np.tri(count, k=-1, dtype=bool)
    some = earlier & (per_block.max(1)[None] > first)
    whole = earlier & (per_block.min(1)[None] >= first + BLOCK)
    return (some & ~whole) | np.eye(count, dtype=bool), whole


def _lists(visible: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Count and indices of the visible key blocks of each query block, as FlexAttention wants them."""
    counts = visible.sum(1).astype(np.int32)
    order = np.argsort(~visible, axis=1, kind="stable").astype(np.int32)
    first, second = (torch.from_numpy(t)[None, None].to(device) for t in (counts, order))
    return first, second


def block_mask(plan: TreePlan, device: torch.device) -> Any:
    """The plan's BlockMask, of the padded size."""
    from torch.nn.attention.flex_attention import BlockMask

    padded = -(-len(plan.ids) // BLOCK) * BLOCK
    table = reach(plan, padded)
    limit = torch.from_numpy(table).to(device)
    some, whole = blocks_of(table)

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv <= q) & (q < limit[kv])

    counts, order = _lists(some, device)
    full_counts, full_order = _lists(whole, device)
    return BlockMask.from_kv_blocks(
        counts,
        order,
        full_counts,
        full_order,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(padded, padded),
    )


@functools.cache
def _kernel(device_type: str) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        return torch.compile(flex_attention)

    def eager(*args: Any, **kwargs: Any) -> torch.Tensor:
        with warnings.catch_warnings():  # torch warns that uncompiled is slow; on a CPU that is what is wanted
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*args, **kwargs)

    return eager


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """Tree attention, the back end `flex`. q: [1, H, U, D]; k, v: [1, G, U, D] -> [1, H, U, D].

    Raises UnsupportedError when a gradient is wanted on a CPU.
    """
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if q.device.type == "cpu" and wants_grad:
        raise UnsupportedError(
            "the attention back end 'flex' has no backward on a CPU (torch 2.13); use 'rect', or run on a GPU"
        )
    key = ("flex", q.device)
    if key not in layout.cache:
        layout.cache[key] = block_mask(layout.plan, q.device)
    mask = layout.cache[key]
    size = q.shape[2]
    extra = mask.seq_lengths[0] - size
    q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, extra)) for t in (q, k, v))
    out = _kernel(q.device.type)(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[:, :, :size]
