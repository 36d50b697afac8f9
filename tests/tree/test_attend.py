"""Attention back ends against one another, and the fallback when the private kernel is not what it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.errors import TrainingError
from gyre_backend.tree import attend
from gyre_backend.tree.plan import build_plan
from tests.forests import make_path, random_paths


def inputs_for(plan, heads=(4, 2), seed=0):
    torch.manual_seed(seed)
    shapes = [(1, heads[0], plan.num_tokens, 8)] + [(1, heads[1], plan.num_tokens, 8)] * 2
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@given(st.integers(0, 10**6), st.sampled_from([(4, 4), (4, 2), (2, 1)]))
def test_backends_agree_with_the_dense_mask(seed: int, heads: tuple[int, int]) -> None:
    plan = build_plan(*random_paths(seed, executions=3, branches=5))
    if not plan.num_tokens:
        return
    inputs = inputs_for(plan, heads)
    weight = torch.randn(1, heads[0], plan.num_tokens, 8, dtype=torch.float64)
    results = {}
    for name in ("dense", "rows", "rect"):
        out = attend.tree_attention(*inputs, plan, scale=0.3, backend=name)
        results[name] = [out, *torch.autograd.grad((out * weight).sum(), inputs)]
    for name in ("rows", "rect"):
        for found, wanted in zip(results[name], results["dense"]):
            assert (found - wanted).abs().max().item() <= 1e-13


@given(st.integers(0, 10**6))
def test_rectangles_tile_the_mask_and_few_cover_a_query(seed: int) -> None:
    plan = build_plan(*random_paths(seed, executions=4, branches=6))
    segments = plan.segments()
    count = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.int64)
    merges = torch.zeros(plan.num_tokens, dtype=torch.int64)
    for qa, qb, ka, kb, causal in attend.rects_of(segments):
        block = torch.ones(qb - qa, kb - ka, dtype=torch.int64)
        count[qa:qb, ka:kb] += block.tril() if causal else block
        merges[qa:qb] += not causal
    assert torch.equal(count, attend.dense_mask(segments, plan.num_tokens).long())
    assert (2**merges <= max(1, plan.num_tokens)).all()


def test_a_leaf_per_turn_takes_two_blocks_per_leaf() -> None:
    history = list(range(1, 30))
    paths = [
        make_path("a", [*history[: 3 * t], 40 + t, 50], [-1] * (3 * t) + [t, t], leaf=str(t)) for t in range(1, 10)
    ]
    plan = build_plan(paths, {"a": 1.0})
    assert len(attend.rects_of(plan.segments())) == 2 * 9 - 1


def test_self_test_passes_here() -> None:
    assert attend.rect_works()


@pytest.mark.parametrize("break_it", ["missing", "wrong"])
def test_broken_kernel_falls_back_to_rows_with_one_warning(monkeypatch, break_it: str) -> None:
    attend.rect_works.cache_clear()
    if break_it == "missing":

        def error() -> float:
            raise AttributeError("no such op")
    else:

        def error() -> float:
            return 1e-3

    monkeypatch.setattr(attend, "_rect_error", error)
    plan = build_plan(*random_paths(1))
    inputs = inputs_for(plan)
    try:
        with pytest.warns(UserWarning, match="self-test"):
            out = attend.tree_attention(*inputs, plan)
        out = attend.tree_attention(*inputs, plan)  # a second warning would be an error here
        assert torch.equal(out, attend.tree_attention(*inputs, plan, backend="rows"))
    finally:
        attend.rect_works.cache_clear()


def test_unknown_backend_and_wrong_shape_are_named() -> None:
    plan = build_plan(*random_paths(1))
    inputs = inputs_for(plan)
    with pytest.raises(TrainingError, match="attention = 'magic'"):
        attend.tree_attention(*inputs, plan, backend="magic")
    with pytest.raises(TrainingError, match="wants"):
        attend.tree_attention(*(t[:, :, 1:] for t in inputs), plan)
