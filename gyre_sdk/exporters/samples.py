"""Training samples as JSON lines: one branch each, every sampled token unmasked in exactly one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_sdk.exporters.conversation import Conversations, as_messages
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire.records import Role


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """What becomes a sample."""

    roles: Sequence[Role] = ("main", "main-summary", "subagent", "subagent-summary")
    orphans: bool = False
    """Also replies that never reached the harness."""
    invalid: bool = False
    """Also executions without a valid outcome."""
    min_reward: float | None = None
    """Only executions with at least this reward (for SFT)."""
    messages: bool = True
    """With texts in OpenAI's chat form, where the log holds them."""


def samples(graphs: Iterable[BranchGraph], options: SampleOptions | None = None) -> Iterator[dict[str, Any]]:
    """Samples as plain dicts. `token_ids[n]`, `loss_mask[n]` (1: sampled, and trained in this sample),
    `logprobs[n]` (null where not sampled), `versions[n]` (-1 where not sampled), and what the execution
    was.
    """
    options = options or SampleOptions()
    for graph in graphs:
        outcome = graph.outcome
        if not options.invalid and (outcome is None or not outcome.valid):
            continue
        reward = None if outcome is None else outcome.reward
        if options.min_reward is not None and (reward is None or reward < options.min_reward):
            continue
        yield from _of_graph(graph, options)


def _of_graph(graph: BranchGraph, options: SampleOptions) -> Iterator[dict[str, Any]]:
    talk = Conversations(graph) if options.messages else None
    taken: set[str] = set()
    order = {role: place for place, role in enumerate(options.roles)}
    leaves = [leaf for leaf in graph.leaves() if leaf.role in order and (options.orphans or not leaf.orphan)]
    for leaf in sorted(leaves, key=lambda leaf: (order[leaf.role], leaf.call)):
        path = leaf.path()
        mask = (path.call >= 0).astype(int)
        for node in leaf.nodes:
            if node.id in taken:
                mask[node.start : node.end] = 0
        taken.update(node.id for node in leaf.nodes)
        if not mask.any():
            continue
        sample: dict[str, Any] = {
            "execution": graph.execution,
            "task": graph.opened.task if graph.opened else "",
            "group": graph.opened.group if graph.opened else "",
            "branch": leaf.id,
            "role": leaf.role,
            "reward": None if graph.outcome is None else graph.outcome.reward,
            "valid": graph.outcome is not None and graph.outcome.valid,
            "token_ids": path.token_ids.tolist(),
            "loss_mask": mask.tolist(),
            "logprobs": [value if math.isfinite(value) else None for value in path.logprobs.tolist()],
            "versions": path.versions.tolist(),
        }
        if talk is not None:
            sample["messages"] = as_messages(talk.whole(leaf.call))
        yield sample


def to_lines(graphs: Iterable[BranchGraph], options: SampleOptions | None = None) -> Iterator[str]:
    """JSON lines."""
    for sample in samples(graphs, options):
        yield json.dumps(sample, allow_nan=False) + "\n"
