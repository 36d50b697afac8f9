"""Attention over a tree plan: every query sees its ancestors and itself, nothing else.

Shapes: `q: [1, Hq, U, D]`, `k, v: [1, Hkv, U, D]`, result `[1, Hq, U, D]`; Hq is a multiple of Hkv (grouped
queries). In depth-first order a segment's descendants are one contiguous range, so the mask is exactly, per
segment, one causal block and one full rectangle (queries of all descendants x keys of the segment), merged by
log-sum-exp. `rect` computes just that.

| backend | how | where |
|---|---|---|
| `rect` | blocks and rectangles through torch's CPU flash kernel | default on a CPU |
| `rows` | per segment: its queries x the keys of its chain, gathered | any device; the fallback |
| `dense` | one [U, U] mask | the reference, for tests and small plans |
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from gyre_backend.errors import TrainingError, UnsupportedError
from gyre_backend.tree.plan import Segment, TreePlan

Rect = tuple[int, int, int, int, bool]
"""(query_start, query_end, key_start, key_end, causal)"""

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Layout", float], torch.Tensor]

# name -> module with an `attend(q, k, v, layout, scale)`; imported on first use.
_ELSEWHERE = {"flash": "gyre_backend.tree.flash", "flex": "gyre_backend.tree.flex"}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What attention needs of a plan, computed once per plan and shared by all layers."""

    plan: TreePlan
    segments: tuple[Segment, ...]
    rects: tuple[Rect, ...]
    cache: dict[Any, Any]
    """for a back end's own precomputed tensors, keyed by (name, device)"""


@functools.lru_cache(maxsize=16)
def layout_of(plan: TreePlan) -> Layout:
    """The plan's layout; those of the last few plans are kept, since every layer asks for it."""
    segments = tuple(plan.segments())
    return Layout(plan, segments, tuple(rects_of(segments)), {})


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: TreePlan,
    scale: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention of `q` over the ancestors of each query. `scale` defaults to 1/sqrt(D).

    See the module's docstring for shapes.
    """
    if q.shape[0] != 1 or q.shape[2] != plan.num_tokens or k.shape[2] != plan.num_tokens:
        wanted = f"[1, heads, {plan.num_tokens}, dim]"
        raise TrainingError(f"tree attention wants {wanted}, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return backend_named(backend, q.device.type)(q, k, v, layout_of(plan), scale)


def backend_named(name: str, device: str = "cpu") -> Backend:
    """The back end called `name`. `auto` is `rect` on a CPU and `flash` on a GPU, or `rows` where that can't
    run."""
    if name == "auto":
        name = "rect" if device == "cpu" else _best_on_gpu()
    if name == "rect" and device == "cpu" and not rect_works():
        name = "rows"
    if name in _ELSEWHERE:
        attend: Backend = importlib.import_module(_ELSEWHERE[name]).attend
        return attend
    try:
        return _BACKENDS[name]
    except KeyError:
        known = ", ".join(sorted({*_BACKENDS, *_ELSEWHERE}))
        raise UnsupportedError(f"attention = {name!r}: known back ends are auto, {known}") from None


@functools.cache
def _best_on_gpu() -> str:
    return "flash" if importlib.util.find_spec("flash_attn") is not None else "rows"


def rects_of(segments: tuple[Segment, ...] | list[Segment]) -> list[Rect]:
    """The mask as few blocks: one causal block per chain, one full rectangle per chain that hangs from
    another.

    A segment and its first child are contiguous in depth-first order, so a chain of first children is one run
    of tokens. A chain's descendants see, of the chain it hangs from, the keys from that chain's start to the
    branch point. With the largest child first (as `build_plan` packs) a query is in at most log2(U)
    rectangles. Causal blocks come first: every row has a log-sum-exp before anything is merged into it.
    """
    own: list[Rect] = []
    below: list[Rect] = []
    begins: list[int] = []  # per segment: where its chain starts
    for segment in segments:
        above = segments[segment.parent] if segment.parent >= 0 else None
        if above is not None and above.end == segment.start:
            begins.append(begins[segment.parent])
            own[-1] = (own[-1][0], segment.end, own[-1][2], segment.end, True)
            continue
        begins.append(segment.start)
        own.append((segment.start, segment.end, segment.start, segment.end, True))
        if above is not None:
            below.append((segment.start, segment.sub_end, begins[segment.parent], above.end, False))
    return own + below


# --- rect ---


class _RectAttention(torch.autograd.Function):
    """The merged output and log-sum-exp make the kernel's own backward exact for every piece (as in ring
    attention)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rects: tuple[Rect, ...], scale: float
    ) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for qa, qb, ka, kb, causal in rects:
            piece, piece_lse = kernel(q[:, :, qa:qb], k[:, :, ka:kb], v[:, :, ka:kb], 0.0, causal, scale=scale)
            if causal:
                out[:, :, qa:qb], lse[:, :, qa:qb] = piece, piece_lse
                continue
            old = lse[:, :, qa:qb]
            new = torch.logaddexp(old, piece_lse)
            keep, add = (
                (old - new).exp_()[..., None].to(out.dtype),
                (piece_lse - new).exp_()[..., None].to(out.dtype),
            )
            out[:, :, qa:qb].mul_(keep).add_(piece.mul_(add))
            lse[:, :, qa:qb] = new
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rects, ctx.scale = rects, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for qa, qb, ka, kb, causal in ctx.rects:
            rows = slice(qa, qb)
            piece = (q[:, :, rows], k[:, :, ka:kb], v[:, :, ka:kb], out[:, :, rows], lse[:, :, rows])
            a, b, c = kernel(grad_out[:, :, rows], *piece, 0.0, causal, scale=ctx.scale)
            dq[:, :, rows] += a
            dk[:, :, ka:kb] += b
            dv[:, :, ka:kb] += c
        return dq, dk, dv, None, None


def _rect(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    return _RectAttention.apply(q, k, v, layout.rects, scale)


@functools.cache
def rect_works() -> bool:
    """Whether torch's private CPU flash kernel does what `rect` needs, checked once per process against a
    plain softmax in float64.

    It is a private op: a torch release may rename it or change its backward. Then `rows` is used, with one
    warning.
    """
    try:
        error = _rect_error()
    except (AttributeError, RuntimeError, TypeError, ValueError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
    else:
        if error <= 1e-12:
            return True
        reason = f"its error is {error:.1e}"
    warnings.warn(
        f"torch's CPU flash kernel failed the tree-attention self-test ({reason}); using 'rows'", stacklevel=2
    )
    return False


def _rect_error() -> float:
    """Largest difference of output and gradients to a masked softmax, on a trunk of 3 with two branches,
    grouped queries."""
    segments = (Segment(0, 3, 6, -1, 0), Segment(3, 4, 4, 0, 1), Segment(4, 6, 6, 0, 1))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        shapes = ((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        weight = torch.randn(shapes[0], dtype=torch.float64)
        out = _RectAttention.apply(*inputs, tuple(rects_of(segments)), 0.4)
        q, k, v = inputs
        scores = (q @ k.repeat_interleave(2, 1).mT) * 0.4
        scores = scores.masked_fill(~dense_mask(segments, 6), -torch.inf)
        wanted = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        pairs = [(out, wanted)]
        pairs += zip(
            torch.autograd.grad((out * weight).sum(), inputs),
            torch.autograd.grad((wanted * weight).sum(), inputs),
        )
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def attend_after(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last n of m tokens: q: [1, Hq, n, D]; k, v: [1, Hkv, m, D], m >= n -> [1, Hq,
    n, D]."""
    own, seen = q.shape[2], k.shape[2]
    if q.device.type == "cpu" and rect_works():
        before = seen - own
        rects = [(0, own, before, seen, True), (0, own, 0, before, False)]
        return _RectAttention.apply(q, k, v, tuple(rects[: 2 if before else 1]), scale)
    mask = torch.ones(own, seen, dtype=torch.bool, device=q.device).tril(seen - own)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


# --- rows and dense ---


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    chains: list[list[Segment]] = []
    pieces = []
    for segment in layout.segments:
        chain = [*(chains[segment.parent] if segment.parent >= 0 else []), segment]
        chains.append(chain)
        keys = torch.cat([k[:, :, s.start : s.end] for s in chain], 2)
        values = torch.cat([v[:, :, s.start : s.end] for s in chain], 2)
        own, seen = segment.end - segment.start, keys.shape[2]
        mask = torch.ones(own, seen, dtype=torch.bool, device=q.device).tril(seen - own)
        query = q[:, :, segment.start : segment.end]
        pieces.append(scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped))
    return torch.cat(pieces, 2)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    key = ("dense", q.device)
    if key not in layout.cache:
        layout.cache[key] = dense_mask(layout.segments, layout.plan.num_tokens).to(q.device)
    mask = layout.cache[key]
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def dense_mask(segments: tuple[Segment, ...] | list[Segment], tokens: int) -> torch.Tensor:
    """bool [U, U]: query row sees key column."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s in segments:
        own = s.end - s.start
        mask[s.start : s.end, s.start : s.end] = torch.ones(own, own, dtype=torch.bool).tril()
        mask[s.end : s.sub_end, s.start : s.end] = True
    return mask


_BACKENDS: dict[str, Backend] = {"rect": _rect, "rows": _rows, "dense": _dense}
