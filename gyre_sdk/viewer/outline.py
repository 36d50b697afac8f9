"""A branch graph as the boxes and arrows of the page: never more than a few hundred, however large the execution is.

A *box* is a run of nodes without a fork between them, named by its first node and its length (`c7`, `c7:40`). A box that is
open is shown as its parts: the nodes of a short run, shorter runs of a long one. Where there are more segments than the page
can hold, the branches with the fewest tokens are folded into the box they depart from, until that one is opened.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_sdk.errors import ConfigError
from gyre_sdk.graph import BranchGraph, Node
from gyre_sdk.graph.segments import Segment, segments
from gyre_sdk.graph.views import typed_edges
from gyre_sdk.viewer.training import Trained

BUDGET = 100
"""Boxes shown before anything is opened."""
PARTS = 40
"""Parts that an open run is shown as."""
MAX_BOXES = 1500


@dataclass(slots=True)
class Box:
    """A run of nodes that is drawn as one."""

    nodes: Sequence[Node]
    segment: Segment
    parent: Box | None = None
    within: str = ""
    """The opened box that it is a part of, the innermost."""
    folded: int = 0
    """Segments behind it that are not shown."""
    weight: float = 0.0
    trained: int = 0
    reasons: list[str] = field(default_factory=list)
    """Typed edges that begin and end inside it or in what it folds."""

    @property
    def id(self) -> str:
        """Name of the run: its first node, and how many nodes when there are several."""
        return box_id(self.nodes)


def box_id(nodes: Sequence[Node]) -> str:
    """`c7` for one node, `c7:40` for a run of forty."""
    return nodes[0].id if len(nodes) == 1 else f"{nodes[0].id}:{len(nodes)}"


def run_of(graph: BranchGraph, identity: str) -> list[Node]:
    """The nodes of a box by its id. Raises ConfigError when there is no such box (any more)."""
    first, colon, count = identity.partition(":")
    node = graph.nodes.get(first)
    if node is None or (colon and not re.fullmatch(r"[1-9][0-9]{0,7}", count)):
        raise ConfigError(f"there is no box {identity[:80]!r} in this execution")
    run = [node]
    while len(run) < int(count or 1):
        followers = list(run[-1].children())
        if len(followers) != 1:
            raise ConfigError(f"the box {identity[:80]!r} has changed; reload the page")
        run.append(followers[0])
    return run


class Outline:
    """The boxes of a graph for a set of opened box ids. `reveal`: nodes whose segments are shown in any case."""

    def __init__(
        self,
        graph: BranchGraph,
        opened: Collection[str] = (),
        trained: Trained | None = None,
        reveal: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self._reveal = set(reveal)
        self._opened = set(opened)
        self._spans = _spans(trained)
        self.boxes: list[Box] = []
        self._home: dict[str, Box] = {}
        """Node -> the box that shows it, or that it is folded into."""
        self._build()

    def box_of(self, node: str) -> Box:
        """The box that shows a node or holds it folded."""
        return self._home[node]

    def page(self) -> dict[str, list[dict[str, Any]]]:
        """Nodes and edges for the page."""
        edges = list(self._edges())
        return {"nodes": [self._box(box) for box in self.boxes], "edges": edges}

    # -- which boxes there are

    def _build(self) -> None:
        roots = segments(self.graph)
        shown = _chosen(roots, BUDGET, self._opened, self._reveal)
        todo: list[tuple[Segment, Box | None]] = [(root, None) for root in reversed(roots) if id(root) in shown]
        while todo:
            segment, parent = todo.pop()
            last = parent
            for run, within in self._parts(segment.nodes, ""):
                last = self._add(Box(run, segment, last, within))
            assert last is not None
            for child in reversed(segment.children):
                if id(child) in shown and len(self.boxes) < MAX_BOXES:
                    todo.append((child, last))
                else:
                    self._fold(child, last)
        for root in roots:
            if id(root) not in shown and self.boxes:
                self._fold(root, self.boxes[0])

    def _add(self, box: Box) -> Box:
        self.boxes.append(box)
        for node in box.nodes:
            self._take(node, box)
        return box

    def _take(self, node: Node, box: Box) -> None:
        self._home[node.id] = box
        if node.call < 0:
            return
        for start, end, weight in self._spans.get(node.call, ()):
            count = min(end, node.offset + len(node)) - max(start, node.offset)
            if count > 0:
                box.trained += count
                box.weight = max(box.weight, weight)

    def _fold(self, segment: Segment, box: Box) -> None:
        for inner in _below(segment):
            box.folded += 1
            for node in inner.nodes:
                self._take(node, box)

    def _parts(self, nodes: Sequence[Node], within: str) -> Iterator[tuple[Sequence[Node], str]]:
        """What a run is shown as, each with the opened run it is a part of."""
        name = box_id(nodes)
        if len(nodes) == 1 or name not in self._opened or len(self.boxes) >= MAX_BOXES:
            yield nodes, within
            return
        size = -(-len(nodes) // PARTS)
        for at in range(0, len(nodes), size):
            yield from self._parts(nodes[at : at + size], name)

    # -- what is said of them

    def _box(self, box: Box) -> dict[str, Any]:
        graph, nodes, segment = self.graph, box.nodes, box.segment
        calls = [node.call for node in nodes if node.call >= 0]
        sampled = sum(len(node) for node in nodes if node.call >= 0)
        last = nodes[-1] is segment.nodes[-1]
        finish = graph.calls[segment.leaf_call].finish if last and segment.leaf_call >= 0 else ""
        return {
            "id": box.id,
            "within": box.within,
            "nodes": len(nodes),
            "tokens": sum(map(len, nodes)),
            "sampled": sampled,
            "calls": [min(calls), max(calls), len(set(calls))] if calls else [],
            "role": segment.role,
            "leaf": segment.leaf_call if last else -1,
            "orphan": segment.orphan and last,
            "finish": finish or "",
            "folded": box.folded,
            "weight": box.weight,
            "trained": box.trained,
            "inside": box.reasons[:20],
        }

    def _edges(self) -> Iterator[dict[str, Any]]:
        for box in self.boxes:
            if box.parent is not None:
                yield {"source": box.parent.id, "target": box.id, "kind": "continues", "reason": "", "inferred": False}
        seen = set[tuple[str, str, str, str]]()
        for edge in typed_edges(self.graph):
            source, target = self._home[edge.source.id], self._home[edge.target.id]
            link = edge.link
            if source is target:
                source.reasons.append(f"{link.kind} call {link.source} → {link.target}: {link.reason}"[:200])
                continue
            key = (source.id, target.id, link.kind, link.reason)
            if key not in seen:
                seen.add(key)
                yield {
                    "source": source.id, "target": target.id, "kind": link.kind, "reason": link.reason[:200],
                    "inferred": link.inferred, "calls": [link.source, link.target],
                }  # fmt: skip


def _below(segment: Segment) -> Iterator[Segment]:
    todo = [segment]
    while todo:
        found = todo.pop()
        yield found
        todo.extend(found.children)


def _chosen(roots: list[Segment], budget: int, opened: set[str], reveal: set[str]) -> set[int]:
    """Ids of the segments that are shown: branches by their tokens, largest first, each with all that leads to it, and
    the children of what was opened by hand.
    """
    parents: dict[int, Segment | None] = {}
    weight: dict[int, int] = {}
    order: list[Segment] = []
    todo: list[tuple[Segment, Segment | None]] = [(root, None) for root in roots]
    while todo:
        segment, parent = todo.pop()
        parents[id(segment)] = parent
        order.append(segment)
        todo.extend((child, segment) for child in segment.children)
    if len(order) <= budget:
        return set(parents)
    for segment in order:
        above = parents[id(segment)]
        weight[id(segment)] = segment.given + segment.sampled + (weight[id(above)] if above is not None else 0)
    shown = set[int]()

    def show(segment: Segment | None) -> None:
        while segment is not None and id(segment) not in shown:
            shown.add(id(segment))
            segment = parents[id(segment)]

    for leaf in sorted((s for s in order if not s.children), key=lambda s: -weight[id(s)]):
        if len(shown) >= budget:
            break
        show(leaf)
    for segment in order:
        if reveal and any(node.id in reveal for node in segment.nodes):
            show(segment)
        if not opened.isdisjoint(_names(segment)):
            show(segment)
            for child in segment.children[:PARTS]:
                show(child)
    return shown


def _names(segment: Segment) -> tuple[str, str]:
    """A segment is opened by its own id, or by that of its last node, where what it folds departs."""
    return box_id(segment.nodes), segment.nodes[-1].id


def _spans(trained: Trained | None) -> dict[int, list[tuple[int, int, float]]]:
    spans: dict[int, list[tuple[int, int, float]]] = {}
    for path in trained.paths if trained is not None else ():
        for call, start, end in path.calls:
            spans.setdefault(call, []).append((start, end, path.weight))
    return spans
