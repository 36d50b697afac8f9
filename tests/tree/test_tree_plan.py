"""Plans: what is packed, what the edges are, and that nothing is lost or counted twice on any way through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.errors import PlanError
from gyre_backend.select.credit import by_role, discounted
from gyre_backend.tree.plan import (
    build_plan,
    edge_child,
    flatten_plan,
    merge_plans,
    plan_from_bytes,
    plan_to_bytes,
    token_parents,
    validate,
)
from tests.forests import edge_rows, make_path, path_to, random_paths

seeds = st.integers(0, 10**6)


@given(seeds)
def test_tree_holds_every_prefix_once_and_every_trained_token_as_one_edge(seed: int) -> None:
    paths, advantages = random_paths(seed, executions=3, branches=5)
    plan = build_plan(paths, advantages)
    wanted, prefixes = {}, set()
    for path in paths:
        at = np.flatnonzero(path.call >= 0)
        if not len(at):
            continue
        ids = path.token_ids[: at[-1] + 1].tolist()
        prefixes |= {tuple(ids[: n + 1]) for n in range(len(ids))}
        for t in at:
            wanted[(path.execution, path.call[t], path.index[t])] = (tuple(ids[:t]), ids[t])
    assert sorted(path_to(plan, u) for u in range(plan.num_tokens)) == sorted(prefixes)
    found = edge_rows(plan)
    assert {key: row[:2] for key, row in found.items()} == wanted
    assert plan.pos.tolist() == [len(path_to(plan, u)) - 1 for u in range(plan.num_tokens)]


@given(seeds)
def test_flat_layout_has_the_same_edges(seed: int) -> None:
    paths, advantages = random_paths(seed)
    plan = build_plan(paths, advantages)
    for flat in (flatten_plan(plan), build_plan(paths, advantages, merge=False)):
        assert edge_rows(flat) == edge_rows(plan)
        assert (flat.seg_parent == -1).all()
        assert flat.num_tokens == plan.flat_tokens
        assert flat.sharing == 0.0


@given(seeds)
def test_weights_of_each_execution_sum_to_one(seed: int) -> None:
    paths, advantages = random_paths(seed, executions=3)
    plan = build_plan(paths, advantages)
    for number in range(len(plan.executions)):
        assert plan.edge_w[plan.edge_exec == number].sum() == pytest.approx(1.0, abs=1e-12)
    by_token = build_plan(paths, advantages, weighting="token")
    assert len(set(by_token.edge_w)) <= 1
    assert by_token.edge_w.sum() == pytest.approx(len(plan.executions), abs=1e-9)
    assert (build_plan(paths, advantages, weighting="50").edge_w == 1 / 50).all()


@given(seeds)
def test_bytes_round_trip(seed: int) -> None:
    plan = build_plan(*random_paths(seed))
    again = plan_from_bytes(plan_to_bytes(plan))
    assert edge_rows(again) == edge_rows(plan)
    assert (again.mult == plan.mult).all()
    assert again.segments() == plan.segments()


@given(seeds)
def test_segments_are_maximal_unbranched_runs(seed: int) -> None:
    plan = build_plan(*random_paths(seed, executions=3, branches=5))
    parents = token_parents(plan)
    children = np.bincount(parents[parents >= 0], minlength=plan.num_tokens)
    for segment in plan.segments():
        assert (children[segment.start : segment.end - 1] == 1).all()
        inside = [u for u in range(plan.num_tokens) if segment.start in _ancestors(parents, u)]
        assert inside == list(range(segment.start, segment.sub_end))
        if segment.parent >= 0:
            assert children[parents[segment.start]] >= 2


def _ancestors(parents, token):
    chain = set()
    while token >= 0:
        chain.add(int(token))
        token = parents[token]
    return chain


def test_samples_that_agree_share_compute_and_keep_both_loss_terms() -> None:
    a, b = make_path("a", [1, 2, 3], [-1, 0, 0]), make_path("b", [1, 2, 3], [-1, 0, 0])
    plan = build_plan([a, b], {"a": 1.0, "b": -1.0})
    assert plan.num_tokens == 3
    assert plan.num_edges == 4
    assert plan.sharing == 0.5


def test_branch_point_is_the_source_of_one_edge_per_continuation() -> None:
    paths = [make_path("a", [1, 2, 3 + k], [-1, -1, k], leaf=str(k)) for k in range(4)]
    plan = build_plan(paths, {"a": 1.0})
    assert plan.edge_src.tolist() == [1] * 4
    assert sorted(plan.edge_tgt.tolist()) == [3, 4, 5, 6]


def test_tokens_after_the_last_trained_one_are_left_out() -> None:
    assert build_plan([make_path("a", [1, 2, 3, 4], [-1, 0, -1, -1])], {"a": 1.0}).num_tokens == 2
    assert build_plan([make_path("a", [1, 2], [-1, -1])], {"a": 1.0}).num_tokens == 0


def test_credit_sets_the_advantage_of_each_token() -> None:
    path = make_path("a", [1, 2, 3, 4], [-1, 0, 1, 1])
    plan = build_plan([path], {"a": 2.0}, credit=discounted(0.5))
    assert plan.edge_adv.tolist() == [1.0, 2.0, 2.0]
    assert build_plan([path], {"a": 2.0}, credit=by_role({"main": 0.1})).edge_adv.tolist() == pytest.approx([0.2] * 3)


@given(seeds, st.integers(0, 5))
def test_sharing_can_be_capped(seed: int, cap: int) -> None:
    paths, advantages = random_paths(seed)
    whole = build_plan(paths, advantages)
    capped = build_plan(paths, advantages, max_shared=[cap] * len(paths))
    assert edge_rows(capped) == edge_rows(whole)
    assert whole.num_tokens <= capped.num_tokens <= whole.flat_tokens
    assert (capped.pos[capped.mult > 1] < cap).all()


def test_merge_puts_forests_side_by_side() -> None:
    plans = [build_plan([make_path(name, [1, 2, 3], [-1, 0, 0])], {name: 1.0}) for name in "ab"]
    merged = merge_plans(plans)
    validate(merged)
    assert merged.executions == ("a", "b")
    assert edge_rows(merged) == edge_rows(plans[0]) | edge_rows(plans[1])
    with pytest.raises(PlanError, match="different executions"):
        merge_plans([plans[0], plans[0]])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("pos", lambda p: np.arange(len(p.pos), dtype=np.int32)),
        ("edge_src", lambda p: p.edge_src + np.int32(1)),
        ("edge_w", lambda p: p.edge_w * 0),
        ("edge_old_logp", lambda p: p.edge_old_logp * np.float32("nan")),
        ("edge_index", lambda p: p.edge_index * 0),
        ("seg_sub_end", lambda p: p.seg_sub_end + np.int32(9)),
        ("seg_end", lambda p: p.seg_end - np.int32(1)),
        ("ids", lambda p: p.ids.astype(np.int64)),
    ],
)
def test_validate_finds_a_broken_plan(field, change) -> None:
    plan = build_plan(*random_paths(3))
    with pytest.raises(PlanError):
        validate(replace(plan, **{field: change(plan)}))


def test_mistakes_have_messages() -> None:
    path = make_path("a", [1, 2], [-1, 0])
    with pytest.raises(PlanError, match="no advantage"):
        build_plan([path], {})
    with pytest.raises(PlanError, match="first token"):
        build_plan([make_path("a", [1, 2], [0, 0])], {"a": 1.0})
    with pytest.raises(PlanError, match="twice"):
        build_plan([path, path], {"a": 1.0})
    with pytest.raises(PlanError, match="weighting"):
        build_plan([path], {"a": 1.0}, weighting="nothing")
    with pytest.raises(PlanError, match="not a tree plan"):
        plan_from_bytes(b"nonsense")


def test_edge_child_is_the_target() -> None:
    plan = build_plan(*random_paths(5))
    child = edge_child(plan)
    assert (plan.ids[child] == plan.edge_tgt).all()
    assert (token_parents(plan)[child] == plan.edge_src).all()
