"""The back ends meant for a GPU, as far as a CPU can tell: flash through its stand-in kernel, flex forward."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from forests import random_paths
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_backend.errors import UnsupportedError
from gyre_backend.tree import flash, flex
from gyre_backend.tree.attend import dense_mask, layout_of, tree_attention
from gyre_backend.tree.plan import TreePlan, build_plan

seeds = st.integers(0, 10**6)


def plan_of(seed: int, **options: int) -> TreePlan:
    return build_plan(*random_paths(seed, **{"executions": 3, "branches": 5} | options))


def inputs_for(plan: TreePlan, heads: tuple[int, int], *, grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, h, plan.num_tokens, 8) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(s, dtype=torch.float64, requires_grad=grad) for s in shapes]


@given(seeds, st.sampled_from([(4, 4), (4, 2), (2, 1)]))
def test_flash_equals_the_dense_mask(seed: int, heads: tuple[int, int]) -> None:
    plan = plan_of(seed)
    if not plan.num_tokens:
        return
    inputs = inputs_for(plan, heads)
    weight = torch.randn(1, heads[0], plan.num_tokens, 8, dtype=torch.float64)
    results = []
    for backend in ("flash", "dense"):
        out = tree_attention(*inputs, plan, scale=0.3, backend=backend)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max().item() <= 1e-12


@given(seeds)
def test_flash_makes_one_call_per_depth_and_covers_every_pair_once(seed: int) -> None:
    plan = plan_of(seed)
    if not plan.num_tokens:
        return
    calls = flash.calls_of(plan, torch.device("cpu"))
    inner = {int(d) for d, e, s in zip(plan.seg_depth, plan.seg_end, plan.seg_sub_end) if s > e}
    assert len(calls) == 1 + len(inner)
    count = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.int64)
    for call in calls:
        rows = torch.arange(plan.num_tokens) if call.rows is None else call.rows
        keys = torch.arange(plan.num_tokens) if call.keys is None else call.keys
        assert len(rows.unique()) == len(rows), "queries of one call must be disjoint"
        q, k = call.cu_q.tolist(), call.cu_k.tolist()
        assert call.cu_q.dtype == call.cu_k.dtype == torch.int32
        assert max(b - a for a, b in pairwise(q)) == call.max_q
        assert max(b - a for a, b in pairwise(k)) == call.max_k
        for (qa, qb), (ka, kb) in zip(pairwise(q), pairwise(k)):
            block = torch.ones(qb - qa, kb - ka, dtype=torch.int64)
            count[rows[qa:qb, None], keys[None, ka:kb]] += block.tril() if call.causal else block
    assert torch.equal(count, dense_mask(plan.segments(), plan.num_tokens).long())


def test_flash_merges_in_float32_for_sixteen_bits() -> None:
    plan = plan_of(4, branches=8)
    inputs = [t.detach().to(torch.bfloat16) for t in inputs_for(plan, (4, 2))]
    found = tree_attention(*inputs, plan, backend="flash")
    wanted = tree_attention(*(t.double() for t in inputs), plan, backend="dense")
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-2


def test_the_stand_in_takes_what_flash_attn_takes() -> None:
    """Names and order of flash-attn 2's `_flash_attn_varlen_forward` and `_backward`, as of 2.7."""
    runs = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    common = [*runs, "dropout_p", "softmax_scale", "causal"]
    given_to_backward = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
    rest = ["window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic"]
    assert list(inspect.signature(flash.varlen_forward_cpu).parameters) == ["q", "k", "v", *common]
    assert list(inspect.signature(flash.varlen_backward_cpu).parameters) == [*given_to_backward, *common, *rest]


@given(seeds, st.sampled_from([(4, 4), (4, 2)]))
@settings(max_examples=15)
def test_flex_forward_equals_the_dense_mask(seed: int, heads: tuple[int, int]) -> None:
    plan = plan_of(seed, longest=60)
    if not plan.num_tokens:
        return
    inputs = inputs_for(plan, heads, grad=False)
    found = tree_attention(*inputs, plan, scale=0.3, backend="flex")
    assert torch.allclose(found, tree_attention(*inputs, plan, scale=0.3, backend="dense"), rtol=0, atol=1e-12)


@given(seeds)
def test_flex_blocks_are_those_of_the_mask(seed: int) -> None:
    plan = plan_of(seed, longest=90)
    if not plan.num_tokens:
        return
    padded = -(-plan.num_tokens // flex.BLOCK) * flex.BLOCK
    mask = torch.eye(padded, dtype=torch.bool)
    mask[: plan.num_tokens, : plan.num_tokens] = dense_mask(plan.segments(), plan.num_tokens)
    tiles = mask.view(padded // flex.BLOCK, flex.BLOCK, -1, flex.BLOCK).transpose(1, 2)
    some, whole = flex.blocks_of(flex.reach(plan, padded))
    assert torch.equal(torch.from_numpy(some | whole), tiles.any(-1).any(-1))
    assert torch.equal(torch.from_numpy(whole), tiles.all(-1).all(-1))


def test_flex_refuses_a_gradient_on_a_cpu() -> None:
    plan = plan_of(1)
    with pytest.raises(UnsupportedError, match="flex"):
        tree_attention(*inputs_for(plan, (2, 2)), plan, backend="flex")


def test_layouts_are_computed_once_per_plan() -> None:
    plan = plan_of(2)
    inputs = inputs_for(plan, (2, 2), grad=False)
    tree_attention(*inputs, plan, backend="flash")
    first = layout_of(plan).cache[("flash", torch.device("cpu"))]
    tree_attention(*inputs, plan, backend="flash")
    assert layout_of(plan).cache[("flash", torch.device("cpu"))] is first
