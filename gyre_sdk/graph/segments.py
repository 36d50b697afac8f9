"""The branch graph in segments: runs of nodes without a fork in them. What people look at, in the terminal
and in exports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_sdk.graph.branch_graph import BranchGraph
from gyre_sdk.graph.nodes import CallLink, Node
from gyre_sdk.graph.views import typed_edges
from gyre_sdk.wire.records import Role


@dataclass(slots=True)
class Segment:
    """A maximal run of nodes each of which has one follower."""

    nodes: list[Node]
    role: Role
    children: list[Segment] = field(default_factory=list)
    incoming: list[CallLink] = field(default_factory=list)
    """Typed edges that end at one of its nodes."""
    leaf_call: int = -1
    """The call whose reply ends the branch here; -1 inside the tree."""
    orphan: bool = False

    @property
    def id(self) -> str:
        """Id of its first node."""
        return self.nodes[0].id

    @property
    def given(self) -> int:
        """Given tokens."""
        return sum(len(node) for node in self.nodes if node.call < 0)

    @property
    def sampled(self) -> int:
        """Sampled tokens."""
        return sum(len(node) for node in self.nodes if node.call >= 0)

    @property
    def calls(self) -> list[int]:
        """Calls that sampled any of its tokens."""
        return sorted({node.call for node in self.nodes if node.call >= 0})


def segments(graph: BranchGraph) -> list[Segment]:
    """Root segments, each with its children; siblings by the call that made them."""
    leaves = {leaf.id: leaf for leaf in graph.leaves()}
    incoming: dict[str, list[CallLink]] = {}
    for edge in typed_edges(graph):
        incoming.setdefault(edge.target.id, []).append(edge.link)
    roots: list[Segment] = []
    todo: list[tuple[Node, list[Segment]]] = [(node, roots) for node in reversed(graph.roots)]
    while todo:
        node, siblings = todo.pop()
        segment = Segment([node], graph.role_of_call(node.owner))
        while len(followers := list(node.children())) == 1:
            node = followers[0]
            segment.nodes.append(node)
        for part in segment.nodes:
            segment.incoming.extend(incoming.get(part.id, []))
        leaf = leaves.get(node.id)
        if leaf is not None:
            segment.leaf_call, segment.orphan, segment.role = leaf.call, leaf.orphan, leaf.role
        siblings.append(segment)
        siblings.sort(key=lambda s: (s.nodes[0].owner, s.nodes[0].id))
        todo.extend((child, segment.children) for child in reversed(followers))
    return roots
