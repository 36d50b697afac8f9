"""Tree attention by flash-attn's variable-length kernels: 1 causal call + 1 full call per depth.

The causal call runs every segment against itself. All rectangles of one depth (queries of a segment's
descendants x the segment's keys) have disjoint query ranges, so they go into one call. Outputs merge by
log-sum-exp; the backward of each call is given the merged output and lse, which makes every piece exact, as
in ring attention. Calls = 1 + depth.

On CUDA the kernels are flash-attn's (float16 and bfloat16). On a CPU a plain stand-in with the same signature runs
instead: it makes the arithmetic around the kernels testable, and is slow. Not run on a GPU yet.

Legend: U packed tokens, H query heads, G key/value heads, D head width, Q and K the tokens of one call, B its
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gyre_backend.errors import UnsupportedError
from gyre_backend.tree.attend import Layout
from gyre_backend.tree.plan import TreePlan


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call. `rows`/`keys` pick its tokens from the packed ones (None: all of them)."""

    rows: torch.Tensor | None
    keys: torch.Tensor | None
    cu_q: torch.Tensor
    """int32[B + 1]"""
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    causal: bool


def calls_of(plan: TreePlan, device: torch.device) -> list[Call]:
    """The causal call, then one call per depth that has descendants."""
    starts, ends, below = plan.seg_start, plan.seg_end, plan.seg_sub_end
    own = _cumulative(ends - starts, device)
    longest = int((ends - starts).max())
    calls = [Call(None, None, own, own, longest, longest, True)]
    for depth in range(int(plan.seg_depth.max()) + 1):
        at = np.flatnonzero((plan.seg_depth == depth) & (below > ends))
        if not len(at):
            continue
        queries, keys = below[at] - ends[at], ends[at] - starts[at]
        calls.append(
            Call(
                rows=_ranges(ends[at], below[at], device),
                keys=_ranges(starts[at], ends[at], device),
                cu_q=_cumulative(queries, device),
                cu_k=_cumulative(keys, device),
                max_q=int(queries.max()),
                max_k=int(keys.max()),
                causal=False,
            )
        )
    return calls


def _cumulative(lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)).to(device)


def _ranges(firsts: np.ndarray, lasts: np.ndarray, device: torch.device) -> torch.Tensor:
    index = np.concatenate([np.arange(a, b) for a, b in zip(firsts, lasts, strict=True)])
    return torch.from_numpy(index.astype(np.int64)).to(device)


Kernel = Callable[..., Any]


def _kernels(device: torch.device) -> tuple[Kernel, Kernel]:
    if device.type != "cuda":
        return varlen_forward_cpu, varlen_backward_cpu
    try:
        from flash_attn.flash_attn_interface import (
            _wrapped_flash_attn_varlen_backward,
            _wrapped_flash_attn_varlen_forward,
        )
    except ImportError:
        raise UnsupportedError(
            "attention = 'flash' needs flash-attn on CUDA: pip install flash-attn --no-build-isolation, or use 'rows'"
        ) from None
    return _wrapped_flash_attn_varlen_forward, _wrapped_flash_attn_varlen_backward


def _take(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return tensor if index is None else tensor.index_select(0, index)


class _TreeFlash(torch.autograd.Function):
    """q: [U, H, D]; k, v: [U, G, D] -> [U, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: list[Call], scale: float
    ) -> torch.Tensor:
        kernel, _ = _kernels(q.device)
        # Merging in the kernels' 16 bits would lose what each depth adds: accumulate in the lse's type.
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(0, dtype=wide), q.new_empty(0)
        for call in calls:
            piece, piece_lse, *_ = kernel(
                _take(q, call.rows),
                _take(k, call.keys),
                _take(v, call.keys),
                cu_seqlens_q=call.cu_q,
                cu_seqlens_k=call.cu_k,
                max_seqlen_q=call.max_q,
                max_seqlen_k=call.max_k,
                dropout_p=0.0,
                softmax_scale=scale,
                causal=call.causal,
            )
            if call.rows is None:
                out, lse = piece.to(wide), piece_lse.clone()
                continue
            old = lse.index_select(1, call.rows)
            new = torch.logaddexp(old, piece_lse)
            keep, add = ((part - new).exp().t()[..., None] for part in (old, piece_lse))
            merged = out.index_select(0, call.rows) * keep + piece.to(wide) * add
            out.index_copy_(0, call.rows, merged)
            lse.index_copy_(1, call.rows, new)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.calls, ctx.scale = calls, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        _, kernel = _kernels(q.device)
        grad_out = grads[0].contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        totals = [torch.zeros_like(t, dtype=wide) for t in (q, k, v)]
        for call in ctx.calls:
            given = [_take(q, call.rows), _take(k, call.keys), _take(v, call.keys)]
            pieces = [torch.empty_like(t) for t in given]
            kernel(
                _take(grad_out, call.rows),
                *given,
                _take(out, call.rows),
                lse if call.rows is None else lse.index_select(1, call.rows).contiguous(),
                *pieces,
                cu_seqlens_q=call.cu_q,
                cu_seqlens_k=call.cu_k,
                max_seqlen_q=call.max_q,
                max_seqlen_k=call.max_k,
                dropout_p=0.0,
                softmax_scale=ctx.scale,
                causal=call.causal,
                window_size_left=-1,
                window_size_right=-1,
                softcap=0.0,
                alibi_slopes=None,
                deterministic=False,
            )
            for total, piece, index in zip(totals, pieces, (call.rows, call.keys, call.keys), strict=True):
                if index is None:
                    total += piece.to(wide)
                else:
                    total.index_add_(0, index, piece.to(wide))
        dq, dk, dv = (total.to(t.dtype) for total, t in zip(totals, (q, k, v), strict=True))
        return dq, dk, dv, None, None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """Tree attention, the back end `flash`. q: [1, H, U, D]; k, v: [1, G, U, D] -> [1, H, U, D].

    Raises UnsupportedError on CUDA without flash-attn.
    """
    key = ("flash", q.device)
    if key not in layout.cache:
        layout.cache[key] = calls_of(layout.plan, q.device)
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    out = _TreeFlash.apply(*packed, layout.cache[key], scale)
    return out.transpose(0, 1)[None]


# --- the CPU stand-in ---


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [H, Q, K] of one run, and K's heads repeated to Q's. Causal means aligned at the last token."""
    repeat = q.shape[1] // k.shape[1]
    wide_k = k.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * scale
    if causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores, wide_k


def _runs(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    return [(slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])) for i in range(len(bounds_q) - 1)]


def varlen_forward_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash-attn's `_flash_attn_varlen_forward`: (out [Q, H, D], lse [H, Q], nothing, nothing)."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys in _runs(cu_seqlens_q, cu_seqlens_k):
        scores, _ = _scores(q[rows], k[keys], softmax_scale, causal)
        lse[:, rows] = scores.logsumexp(-1).to(lse.dtype)
        repeat = q.shape[1] // v.shape[1]
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys].repeat_interleave(repeat, 1))
    nothing = q.new_empty(0)
    return out, lse, nothing, nothing


def varlen_backward_cpu(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> torch.Tensor:
    """flash-attn's `_flash_attn_varlen_backward`: fills dq, dk, dv from the given (merged) out and lse."""
    heads, groups, width = q.shape[1], k.shape[1], q.shape[2]
    delta = (dout * out).sum(-1).t()
    for rows, keys in _runs(cu_seqlens_q, cu_seqlens_k):
        scores, wide_k = _scores(q[rows], k[keys], softmax_scale, causal)
        p = (scores - softmax_lse[:, rows, None]).exp().to(q.dtype)
        wide_v = v[keys].repeat_interleave(heads // groups, 1)
        dp = torch.einsum("qhd,khd->hqk", dout[rows], wide_v)
        ds = p * (dp - delta[:, rows, None]) * softmax_scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, wide_k)
        shared = (-1, groups, heads // groups, width)
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[rows]).reshape(shared).sum(2)
        dv[keys] = torch.einsum("hqk,qhd->khd", p, dout[rows]).reshape(shared).sum(2)
    return delta
