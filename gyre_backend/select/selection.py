"""From branch graphs to training paths: one execution (`select`), one group (`select_group`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gyre_backend.errors import UnsupportedError
from gyre_backend.select.advantages import ExecutionResult, advantages, equal_rewards
from gyre_backend.select.choose import Branch, Choice, choose
from gyre_backend.select.paths import TrainPath
from gyre_sdk.graph import BranchGraph, Leaf

DEFAULT_ROLES = ("main", "main-summary", "subagent", "subagent-summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """How a group becomes paths."""

    roles: tuple[str, ...] = DEFAULT_ROLES
    """in the order in which their branches are taken; a role not named is never trained"""
    j_max: int | None = 5
    """paths per execution; None takes all"""
    estimator: str = "grpo"
    equal_rewards: Literal["skip", "keep"] = "skip"
    """a group whose executions all have the same reward"""
    placeholders: Literal["count", "drop"] = "drop"
    """executions with nothing to grade: reward 0 in the baseline, or out of it like invalid ones"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.j_max is not None and self.j_max < 1:
            raise UnsupportedError(f"selection.j_max = {self.j_max}: wanted at least 1, or none for all paths")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSelection:
    """A group, ready to become a tree plan."""

    paths: tuple[TrainPath, ...]
    advantages: dict[str, float]
    """of every execution that counts"""
    num_executions: int
    """what the group adds to N: executions that count, 0 for a skipped group"""
    skipped: bool
    """equal rewards, and the config says to skip those"""
    counters: dict[str, int]
    """executions (all), invalid, placeholders, branches, paths, sampled_tokens, trained_tokens,
    orphan_tokens"""


def select(graph: BranchGraph, *, roles: Sequence[str], j_max: int | None, seed: int) -> list[TrainPath]:
    """The paths of one execution that are trained, in the order they were taken.

    A reply that was never delivered whole nor built upon, or that ended by an abort or an error, is context
    at most.
    """
    leaves = graph.leaves()
    trainable = _trainable_calls(graph)
    branches = [Branch(leaf.id, leaf.role, _extent(leaf, trainable)) for leaf in leaves]
    choices = choose(branches, roles=roles, j_max=j_max, seed=(seed, *graph.execution.encode()))
    group = graph.opened.group if graph.opened else ""
    paths = (_path(graph.execution, group, leaves[choice.branch], choice) for choice in choices)
    return [path for path in paths if path is not None]


def select_group(graphs: Sequence[BranchGraph], config: SelectionConfig) -> GroupSelection:
    """Select from the sealed graphs of one group. An execution without an outcome counts as invalid."""
    results = [_result(graph, config) for graph in graphs]
    skipped = config.equal_rewards == "skip" and equal_rewards(results)
    values = advantages(results, config.estimator)
    counters = {
        "executions": len(graphs),
        "invalid": sum(not result.counts for result in results),
        "placeholders": sum(result.placeholder for result in results),
        "branches": sum(len(graph.leaves()) for graph in graphs),
        "sampled_tokens": sum(len(call.output_ids) for graph in graphs for call in graph.calls.values() if call.done),
        "orphan_tokens": sum(_orphan_tokens(graph) for graph in graphs),
    }
    paths: list[TrainPath] = []
    for graph, result in zip(graphs, results):
        if result.counts and not result.placeholder and not skipped:
            paths += select(graph, roles=config.roles, j_max=config.j_max, seed=config.seed)
    counters |= {"paths": len(paths), "trained_tokens": sum(path.trained for path in paths)}
    return GroupSelection(
        paths=tuple(paths),
        advantages=values,
        num_executions=0 if skipped else sum(result.counts for result in results),
        skipped=skipped,
        counters=counters,
    )


def _result(graph: BranchGraph, config: SelectionConfig) -> ExecutionResult:
    group = graph.opened.group if graph.opened else ""
    outcome = graph.outcome
    if outcome is None:
        return ExecutionResult(graph.execution, group, None, False)
    placeholder = outcome.placeholder and config.placeholders == "count"
    valid = outcome.valid and not outcome.placeholder
    return ExecutionResult(graph.execution, group, outcome.reward, valid, placeholder)


def _trainable_calls(graph: BranchGraph) -> frozenset[int]:
    return frozenset(
        number
        for number, call in graph.calls.items()
        if call.done
        and call.finish in ("stop", "length")
        and not graph.orphan(number)
        and np.isfinite(call.logprobs).all()
    )


def _orphan_tokens(graph: BranchGraph) -> int:
    trainable = _trainable_calls(graph)
    return sum(len(c.output_ids) for number, c in graph.calls.items() if c.done and number not in trainable)


def _extent(leaf: Leaf, trainable: frozenset[int]) -> dict[int, int]:
    extent: dict[int, int] = {}
    for node in leaf.nodes:
        if node.call in trainable:
            extent[node.call] = node.offset + len(node)
    return extent


def _path(execution: str, group: str, leaf: Leaf, choice: Choice) -> TrainPath | None:
    arrays = leaf.path()
    mine = np.zeros(len(arrays), bool)
    for call, (start, end) in choice.fresh.items():
        mine |= (arrays.call == call) & (arrays.index >= start) & (arrays.index < end)
    mine[0] = False
    if not mine.any():
        return None
    last = int(np.flatnonzero(mine)[-1]) + 1
    mine = mine[:last]
    return TrainPath(
        execution=execution,
        group=group,
        role=leaf.role,
        leaf=leaf.id,
        token_ids=arrays.token_ids[:last],
        call=np.where(mine, arrays.call[:last], -1).astype(np.int32),
        index=np.where(mine, arrays.index[:last], -1).astype(np.int32),
        old_logprobs=np.where(mine, arrays.logprobs[:last], np.nan).astype(np.float32),
        versions=np.where(mine, arrays.versions[:last], -1).astype(np.int32),
    )
