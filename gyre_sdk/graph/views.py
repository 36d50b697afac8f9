"""The branch graph in other forms: a `networkx.DiGraph` with typed edges, and a digest of its canonical
form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gyre_sdk.graph.nodes import Call, CallLink, Node
from gyre_sdk.graph.roles import role_of_call

if TYPE_CHECKING:
    import networkx as nx

    from gyre_sdk.graph.state import GraphState


class TypedEdge(NamedTuple):
    """An edge between nodes other than `continues`."""

    source: Node
    target: Node
    link: CallLink


def typed_edges(graph: GraphState) -> Iterator[TypedEdge]:
    """Each link between two finished calls, as an edge between nodes.

    It ends at the first node that the target call brought into the graph (the first on its path with itself
    as the owner) and begins at the end of the source call's reply; a re-render begins at the node of the old
    context in which the new one departs from it. Owners never decrease along `continues` and grow along every
    typed edge, so no cycle is possible.
    """
    for link in graph.links():
        source, target = graph.calls.get(link.source), graph.calls.get(link.target)
        if source is None or target is None or source.last is None or target.last is None:
            continue
        end = first_own(target)
        begin = broken_node(graph, link.source, link.target) if link.kind == "rerenders" else source.last
        if end is not None and begin is not None and begin is not end and begin.owner < end.owner:
            yield TypedEdge(begin, end, link)


def first_own(call: Call) -> Node | None:
    """The first node on a finished call's path that no earlier call holds; None when it added nothing."""
    node, found = call.last, None
    while node is not None and node.owner == call.number:
        node, found = node.parent, node
    return found


def broken_node(graph: GraphState, old: int, new: int) -> Node | None:
    """The first node on the old call's path that the new call's path doesn't share; the old end when it
    shares all.
    """
    shared = {id(node) for node in graph.path_nodes(new)}
    for node in graph.path_nodes(old):
        if id(node) not in shared:
            return node
    return graph.calls[old].last


def to_networkx(graph: GraphState) -> nx.DiGraph:
    """A new DiGraph. Node attributes: provenance, call, offset, start, length, owner, role, `token_ids`
    (int32[n]), and for sampled nodes `logprobs` (float32[n]) and `versions` (spans within the node). Edge
    attributes: kind, reason, inferred, source_call, target_call; a pair of nodes joined for several reasons
    carries the others in `also`. Graph attributes: execution, group, task, harness, model, outcome fields.
    """
    import networkx as nx

    result = nx.DiGraph(**graph_attributes(graph))
    for identity in sorted(graph.nodes):
        result.add_node(identity, **node_attributes(graph, graph.nodes[identity]))
    for identity in sorted(graph.nodes):
        parent = graph.nodes[identity].parent
        if parent is not None:
            result.add_edge(parent.id, identity, kind="continues")
    for source, target, link in typed_edges(graph):
        attributes: dict[str, Any] = {
            "kind": link.kind,
            "reason": link.reason,
            "inferred": link.inferred,
            "source_call": link.source,
            "target_call": link.target,
        }
        if result.has_edge(source.id, target.id):
            edge = result.edges[source.id, target.id]
            edge["also"] = (*edge.get("also", ()), attributes)
        else:
            result.add_edge(source.id, target.id, **attributes)
    return result


def graph_attributes(graph: GraphState) -> dict[str, str | float | bool]:
    """Facts about the execution, as plain values."""
    facts: dict[str, str | float | bool] = {"execution": graph.execution}
    if graph.opened is not None:
        facts |= {key: getattr(graph.opened, key) for key in ("group", "task", "harness", "model")}
        facts["opened_at"] = graph.opened.at
    if graph.outcome is not None:
        facts |= {"status": graph.outcome.status, "valid": graph.outcome.valid}
        if graph.outcome.reward is not None:
            facts["reward"] = graph.outcome.reward
    return facts


def node_attributes(graph: GraphState, node: Node) -> dict[str, Any]:
    """What `to_networkx` says of a node."""
    facts: dict[str, Any] = {
        "provenance": node.provenance,
        "call": node.call,
        "offset": node.offset,
        "start": node.start,
        "length": len(node),
        "owner": node.owner,
        "role": role_of_call(graph, node.owner, graph._roles),
        "token_ids": node.token_ids,
    }
    if node.call >= 0:
        call = graph.calls[node.call]
        low, high = node.offset, node.offset + len(node)
        facts["logprobs"] = call.logprobs[low:high]
        facts["versions"] = tuple(
            (span.version, max(span.start, low) - low, min(span.end, high) - low)
            for span in call.versions
            if span.end > low and span.start < high
        )
        facts["delivered"] = call.delivered is True
        facts["orphan"] = graph.orphan(node.call)
        facts["finish"] = call.finish or ""
    return facts


def digest(graph: GraphState) -> str:
    """BLAKE2b over the canonical form: nodes by id, calls by number, links, labels, outcome."""
    state = hashlib.blake2b(digest_size=16)
    put = msgspec.msgpack.Encoder(order="sorted").encode
    state.update(put(graph_attributes(graph)))
    for identity in sorted(graph.nodes):
        node = graph.nodes[identity]
        parent = None if node.parent is None else node.parent.id
        state.update(put((identity, parent, node.start, node.call, node.offset, node.owner, node.token_ids.tobytes())))
    for number in sorted(graph.calls):
        state.update(put(_call_facts(graph.calls[number])))
    for link in graph.links():
        state.update(put((link.kind, link.source, link.target, link.reason, link.inferred)))
    for source, target, link in typed_edges(graph):
        state.update(put((source.id, target.id, link.kind)))
    for number, (role, reason) in graph.labels.items():
        state.update(put((number, role, reason)))
    for event in sorted(put(event) for event in graph.events):
        state.update(event)
    if graph.sealed is not None:
        state.update(put(graph.sealed))
    return state.hexdigest()


_FACTS = [
    "number",
    "at",
    "done_at",
    "first_token_at",
    "state",
    "dialect",
    "base_call",
    "base_len",
    "prompt_tokens",
    "cached_tokens",
    "sampling",
    "marks",
    "rerender",
    "rerender_of",
    "versions",
    "finish",
    "engine",
    "error",
    "delivered",
]


def _call_facts(call: Call) -> tuple[object, ...]:
    arrays = tuple(array.tobytes() for array in (call.delta, call.output_ids, call.logprobs))
    ends = tuple(None if node is None else node.id for node in (call.first, call.last))
    return (*(getattr(call, name) for name in _FACTS), *arrays, *ends)
