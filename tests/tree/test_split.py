"""Pieces keep every edge with its context, stay under the cap, and are cut where least is computed twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.errors import PlanError
from gyre_backend.tree.cost import CostModel, cost, flat_cost, flat_pairs, flop_bound, tree_pairs
from gyre_backend.tree.plan import build_plan, flatten_plan, merge_plans
from gyre_backend.tree.split import balance, piece, split_dfs
from tests.forests import edge_rows, make_path, random_paths

MODEL = CostModel.of_sizes(parameters=1000, width=16, layers=2, vocabulary=61)
seeds = st.integers(0, 10**6)


def all_rows(plans):
    rows: dict = {}
    for plan in plans:
        found = edge_rows(plan)
        assert not rows.keys() & found.keys()
        rows |= found
    return rows


@given(seeds, st.integers(0, 9))
def test_pieces_hold_every_edge_once_under_the_cap(seed: int, slack: int) -> None:
    plan = build_plan(*random_paths(seed, executions=3, branches=5))
    if not plan.num_tokens:
        return
    cap = int(plan.pos.max()) + 1 + slack
    parts = split_dfs(plan, cap)
    assert max((part.num_tokens for part in parts), default=0) <= cap
    assert all_rows(parts) == edge_rows(plan)
    assert all_rows([flatten_plan(part) for part in parts]) == edge_rows(plan)


@given(seeds)
def test_split_computes_as_little_twice_as_any_cut_can(seed: int) -> None:
    plan = build_plan(*random_paths(seed, executions=2, branches=3, longest=3))
    if not plan.num_tokens or plan.num_tokens > 14:
        return
    cap = int(plan.pos.max()) + 2
    if plan.num_tokens <= cap:
        return
    pos = plan.pos.tolist()
    best = np.inf
    for count in range(plan.num_tokens):
        for cuts in itertools.combinations(range(1, plan.num_tokens), count):
            bounds = [0, *cuts, plan.num_tokens]
            if all(b - a + pos[a] <= cap for a, b in itertools.pairwise(bounds)):
                best = min(best, sum(pos[a] + 1 for a in cuts))
    from gyre_backend.tree.split import _cheapest_cuts

    cuts = _cheapest_cuts(plan.pos, np.arange(plan.num_tokens), cap)[1:]
    assert sum(pos[a] + 1 for a in cuts) == best


@given(seeds, st.integers(0, 12))
def test_whole_replies_stay_together(seed: int, slack: int) -> None:
    plan = build_plan(*random_paths(seed, executions=3, branches=4))
    if not plan.num_tokens:
        return
    try:
        parts = split_dfs(plan, int(plan.pos.max()) + 1 + slack, whole_replies=True)
    except PlanError:
        return
    assert all_rows(parts) == edge_rows(plan)
    where: dict = {}
    for number, part in enumerate(parts):
        for execution, call, _ in part.edge_keys():
            assert where.setdefault((execution, call), number) == number


@given(seeds, st.integers(1, 6))
def test_balance_gives_every_rank_as_many_micro_batches(seed: int, ranks: int) -> None:
    paths, advantages = random_paths(seed, executions=3, branches=5)
    plan = build_plan(paths, advantages)
    if plan.num_tokens < 40:
        return
    shares = balance(plan, ranks, MODEL, max_tokens=int(plan.pos.max()) + 5)
    assert len(shares) == ranks
    assert all_rows([part for share in shares for part in share]) == edge_rows(plan)
    assert len({len(share) for share in shares if share}) == 1


def test_min_max_cost_is_near_ideal() -> None:
    plan = merge_plans(build_plan(*_renamed(seed, executions=6, branches=6, longest=40)) for seed in range(4))
    for ranks in (2, 4, 8):
        shares = balance(plan, ranks, MODEL)
        worst = max(sum(cost(part, MODEL) for part in share) for share in shares)
        assert worst <= 1.5 * cost(plan, MODEL) / ranks


def _renamed(seed, **sizes):
    from dataclasses import replace

    paths, advantages = random_paths(seed, **sizes)
    return [replace(p, execution=f"{seed}.{p.execution}") for p in paths], {
        f"{seed}.{e}": a for e, a in advantages.items()
    }


def test_64_ranks_get_all_edges_of_256_executions() -> None:
    plan = merge_plans(build_plan(*_renamed(seed, executions=8, branches=6, longest=30)) for seed in range(32))
    shares = balance(plan, 64, MODEL)
    assert sum(part.num_edges for share in shares for part in share) == plan.num_edges
    assert all(shares)


def test_cost_counts_pairs() -> None:
    plan = build_plan([make_path("a", [1, 2, 3 + k], [-1, -1, k], leaf=str(k)) for k in range(2)], {"a": 1.0})
    assert tree_pairs(plan) == 1 + 2 + 3 + 3
    assert flat_pairs(plan) == 2 * (1 + 2 + 3)
    assert flat_cost(plan, MODEL) == cost(flatten_plan(plan), MODEL)
    assert flop_bound(flatten_plan(plan), MODEL) == 1.0


def test_what_does_not_fit_is_said() -> None:
    plan = build_plan([make_path("a", list(range(1, 9)), [-1] + [0] * 7)], {"a": 1.0})
    with pytest.raises(PlanError, match="max_tokens = 5"):
        split_dfs(plan, 5)
    with pytest.raises(PlanError, match="max_path = 7"):
        split_dfs(plan, 50, max_path=7)
    assert piece(plan, 3, 3).num_edges == 0
