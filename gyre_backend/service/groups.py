"""From a group's sealed graphs to micro-steps: selection, advantages, the prefix tree, its split. Pure, and
slow enough for a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_backend.config import BackendConfig
from gyre_backend.errors import PlanError
from gyre_backend.select.credit import Credit, combined
from gyre_backend.select.selection import GroupSelection, SelectionConfig, select_group
from gyre_backend.tree.plan import TreePlan, build_plan, plan_to_bytes
from gyre_backend.tree.split import split_dfs
from gyre_sdk.graph import BranchGraph


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """A group as micro-steps (`plan_to_bytes`), with what the metrics and the scheduler need to know of
    it.
    """

    group: str
    micros: tuple[bytes, ...]
    micro_tokens: tuple[int, ...]
    """Unique tokens of each micro-step: its share of the work."""
    num_executions: int
    """What it adds to N."""
    rewards: tuple[float, ...]
    """Of the executions that count."""
    tokens: int
    """Unique tokens of the group's tree."""
    flat_tokens: int
    """Tokens that path-by-path training would compute."""
    edges: int
    """Trained tokens."""
    version_sum: int
    """Sum of the sampling versions over the trained tokens: staleness is version * edges - this, over
    edges.
    """
    oldest_version: int
    counters: dict[str, int]
    taken: tuple[dict[str, Any], ...] = ()
    """The trajectories that were taken, for people who look at the run: see `taken_paths`."""


def selection_config(config: BackendConfig, estimator: str) -> SelectionConfig:
    """The selection's settings out of `[algorithm]`."""
    table = config.algorithm
    return SelectionConfig(
        roles=table.roles,
        j_max=table.j_max or None,
        estimator=table.estimator or estimator,
        equal_rewards=table.equal_rewards,
        placeholders=table.placeholders,
        seed=table.seed,
    )


def credit_of(config: BackendConfig) -> Credit | None:
    """How `[algorithm]` spreads an execution's advantage over its tokens; None: evenly."""
    table = config.algorithm
    return combined({str(role): factor for role, factor in table.role_credit.items()}, table.credit_discount)


def prepare(
    group: str,
    graphs: Sequence[BranchGraph],
    selection: SelectionConfig,
    *,
    weighting: str,
    micro_tokens: int,
    whole_replies: bool,
    credit: Credit | None = None,
) -> PreparedGroup | None:
    """None when there is nothing to train: no valid execution, no trainable token, or equal rewards that are
    to be skipped.
    """
    chosen = select_group(graphs, selection)
    if chosen.num_executions == 0 or not any(path.trained for path in chosen.paths):
        return None
    plan = build_plan(chosen.paths, chosen.advantages, weighting=weighting, credit=credit)
    parts = _split(plan, micro_tokens, whole_replies)
    versions = plan.edge_version.astype(np.int64)
    counted = set(chosen.advantages)
    return PreparedGroup(
        group=group,
        micros=tuple(plan_to_bytes(part) for part in parts),
        micro_tokens=tuple(part.num_tokens for part in parts),
        num_executions=chosen.num_executions,
        rewards=tuple(_reward(graph) for graph in graphs if graph.execution in counted),
        tokens=plan.num_tokens,
        flat_tokens=plan.flat_tokens,
        edges=plan.num_edges,
        version_sum=int(versions.sum()),
        oldest_version=int(versions.min()),
        counters=dict(chosen.counters),
        taken=taken_paths(plan, chosen),
    )


def taken_paths(plan: TreePlan, chosen: GroupSelection) -> tuple[dict[str, Any], ...]:
    """Each taken path as plain values: execution, leaf, role, weight of its trained tokens (before the division by N),
    advantage, and what it trains as [call, start, end).
    """
    numbers, first = np.unique(plan.edge_exec, return_index=True)
    weights = {plan.executions[e]: float(w) for e, w in zip(numbers, plan.edge_w[first], strict=True)}
    taken = []
    for path in chosen.paths:
        calls = []
        for call in np.unique(path.call[path.call >= 0]):
            index = path.index[path.call == call]
            calls.append([int(call), int(index.min()), int(index.max()) + 1])
        taken.append({
            "execution": path.execution, "leaf": path.leaf, "role": path.role, "weight": weights[path.execution],
            "advantage": float(chosen.advantages[path.execution]), "calls": calls,
        })  # fmt: skip
    return tuple(taken)


def _split(plan: TreePlan, micro_tokens: int, whole_replies: bool) -> list[TreePlan]:
    """Micro-steps of at most `micro_tokens`; a path that is longer sets the bound itself, for it can't be
    cut.
    """
    bound = max(micro_tokens, int(plan.pos.max()) + 1)
    try:
        return split_dfs(plan, bound, whole_replies=whole_replies)
    except PlanError:
        return [plan]  # a reply that must stay whole is longer, with its context, than any bound


def _reward(graph: BranchGraph) -> float:
    outcome = graph.outcome
    return 0.0 if outcome is None or outcome.reward is None else outcome.reward
