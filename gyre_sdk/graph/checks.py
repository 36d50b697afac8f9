"""What must hold of every branch graph: for tests, and for `verify` commands that read a log."""

from __future__ import annotations

import numpy as np

from gyre_sdk.errors import GraphError
from gyre_sdk.graph.branch_graph import BranchGraph
from gyre_sdk.graph.nodes import Call, Node
from gyre_sdk.graph.views import typed_edges


def check_invariants(graph: BranchGraph) -> None:
    """Raises GraphError naming the first thing that is wrong. O(nodes + links)."""
    reached = set()
    todo = list(graph.roots)
    for root in todo:
        _require(root.parent is None and root.start == 0, root, "a root begins at 0, without a parent")
    while todo:
        node = todo.pop()
        reached.add(node.id)
        _require(graph.nodes.get(node.id) is node, node, "is known under its id")
        _require(len(node) > 0, node, "holds a token")
        _check_children(node)
        if node.call >= 0:
            call = graph.calls[node.call]
            span = call.output_ids[node.offset : node.offset + len(node)]
            _require(np.array_equal(span, node.token_ids), node, "holds its call's output")
        todo.extend(node.children())
    if reached != set(graph.nodes):
        raise GraphError(f"{len(set(graph.nodes) - reached)} nodes hang nowhere")
    for call in graph.calls.values():
        _check_call(graph, call)
    for source, target, link in typed_edges(graph):
        if not source.owner < target.owner:
            raise GraphError(f"the {link.kind} edge {source.id} → {target.id} leads back in time")


def _require(holds: bool, node: Node, what: str) -> None:
    if not holds:
        raise GraphError(f"node {node.id} breaks the rule: {what}")


def _check_children(node: Node) -> None:
    firsts = [int(child.token_ids[0]) for child in node.children() if child.call < 0]
    _require(len(firsts) == len(set(firsts)), node, "given followers differ in their first token")
    for child in node.children():
        _require(child.parent is node and child.start == node.end, child, "follows its parent")
        _require(child.owner >= node.owner, child, "owners never decrease along continues")
        if child.call >= 0:
            tail = child.call == node.call and child.offset == node.offset + len(node)
            _require(child.offset == 0 or tail, child, "a sampled node begins a reply or goes on with it")


def _check_call(graph: BranchGraph, call: Call) -> None:
    if not call.done:
        if call.first is not None or call.last is not None:
            raise GraphError(f"call {call.number} is {call.state}, but has nodes")
        return
    nodes = graph.path_nodes(call.number)
    length = sum(map(len, nodes))
    if length != call.prompt_tokens + len(call.output_ids):
        raise GraphError(f"call {call.number} ends at {length}, not {call.prompt_tokens + len(call.output_ids)}")
    if any(node.owner > call.number for node in nodes):
        raise GraphError(f"call {call.number} holds a node whose owner is later")
