"""The token tree under a branch graph: every token once, split where contexts part.

Given tokens merge with equal given tokens behind the same node; sampled tokens never merge (each has the
logprob of one call). So the tree depends only on *which* calls it holds, not on the order in which they came,
and so do the ids of its nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gyre_sdk.graph.nodes import Call, Int32, Node


def common_prefix(a: Int32, b: Int32) -> int:
    """How many leading elements are equal."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    if n <= 8:
        for i in range(n):
            if a[i] != b[i]:
                return i
        return n
    # Most comparisons are either whole or end early: look at a short head before the rest.
    head = int(np.argmin(a[:8] == b[:8])) if (a[:8] != b[:8]).any() else 8
    if head < 8:
        return head
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the tree: behind the first `within` tokens of `node`; the very beginning when `node` is
    None.
    """

    node: Node | None
    within: int

    @property
    def length(self) -> int:
        """Tokens before it."""
        return 0 if self.node is None else self.node.start + self.within

    @property
    def at_end(self) -> bool:
        """Between nodes, not inside one."""
        return self.node is None or self.within == len(self.node)


ROOT = Place(None, 0)


class TokenTree:
    """The forest of nodes. `calls` is shared with the graph: splitting a node moves the ends of the calls
    that ended in it.
    """

    def __init__(self, calls: dict[int, Call]) -> None:
        self.calls = calls
        self.nodes: dict[str, Node] = {}
        self.root_given: dict[int, Node] = {}
        self.root_sampled: list[Node] = []

    def roots(self) -> Iterator[Node]:
        """First nodes of all contexts."""
        for token in sorted(self.root_given):
            yield self.root_given[token]
        yield from self.root_sampled

    def given_after(self, node: Node | None) -> dict[int, Node]:
        """Given nodes that follow, by first token."""
        return self.root_given if node is None else (node.given or {})

    def sampled_after(self, node: Node | None) -> list[Node]:
        """Sampled nodes that follow."""
        return self.root_sampled if node is None else (node.sampled or [])

    def place(self, last: Node | None, length: int) -> Place:
        """The position after `length` tokens on the path that ends with `last`: O(nodes behind it)."""
        if length == 0:
            return ROOT
        node = last
        while node is not None and node.start >= length:
            node = node.parent
        assert node is not None
        return Place(node, length - node.start)

    def add_given(self, place: Place, tokens: Int32, owner: int) -> Node | None:
        """Walk on with given `tokens`, adding what is new; returns the node that ends with them."""
        while len(tokens):
            node = place.node
            if node is not None and not place.at_end:
                same = common_prefix(node.token_ids[place.within :], tokens) if node.call < 0 else 0
                if place.within + same < len(node):
                    self.split(node, place.within + same)
                place, tokens = Place(node, place.within + same), tokens[same:]
                continue
            child = self.given_after(node).get(int(tokens[0]))
            if child is None:
                return self._new_given(node, np.array(tokens, np.int32), owner)
            place = Place(child, 0)
        if place.node is not None and not place.at_end:
            self.split(place.node, place.within)
        return place.node

    def add_sampled(self, parent: Node | None, call: Call) -> Node:
        """Hang the call's whole output behind `parent`."""
        node = Node(
            f"c{call.number}",
            parent,
            0 if parent is None else parent.end,
            call.output_ids,
            call.number,
            0,
            call.number,
        )
        self._attach_sampled(parent, node)
        self.nodes[node.id] = node
        return node

    def own(self, last: Node | None, call: int) -> None:
        """Note that `call`'s path ends with `last`: owners are the smallest call numbers, never growing
        towards the root.
        """
        node = last
        while node is not None and node.owner >= call:
            node.owner = call
            node = node.parent

    def split(self, node: Node, k: int) -> Node:
        """Cut `node` after its first k tokens; the head keeps the object and the id. Returns the tail."""
        assert 0 < k < len(node)
        call, offset = node.call, node.offset + k if node.call >= 0 else 0
        start = node.start + k
        identity = f"c{call}+{offset}" if call >= 0 else self._given_id(node.parent, node.token_ids, k)
        tail = Node(identity, node, start, node.token_ids[k:], call, offset, node.owner)
        node.token_ids = node.token_ids[:k]
        tail.given, tail.sampled, tail.enders = node.given, node.sampled, node.enders
        node.given = node.sampled = node.enders = None
        for child in tail.children():
            child.parent = tail
        if call >= 0:
            node.sampled = [tail]
            if self.calls[call].last is node:
                self.calls[call].last = tail
        else:
            node.given = {int(tail.token_ids[0]): tail}
        for ender in tail.enders or ():
            self.calls[ender].last = tail
        self.nodes[identity] = tail
        return tail

    def _new_given(self, parent: Node | None, tokens: Int32, owner: int) -> Node:
        tokens.flags.writeable = False
        start = 0 if parent is None else parent.end
        node = Node(self._given_id(parent, tokens, 0), parent, start, tokens, -1, 0, owner)
        if parent is None:
            self.root_given[int(tokens[0])] = node
        else:
            if parent.given is None:
                parent.given = {}
            parent.given[int(tokens[0])] = node
        self.nodes[node.id] = node
        return node

    def _attach_sampled(self, parent: Node | None, node: Node) -> None:
        if parent is None:
            siblings = self.root_sampled
        else:
            if parent.sampled is None:
                parent.sampled = []
            siblings = parent.sampled
        siblings.append(node)
        siblings.sort(key=lambda n: (n.call, n.offset))

    def _given_id(self, parent: Node | None, tokens: Int32, k: int) -> str:
        """Names the given node starting at tokens[k] behind `parent` by all given tokens since the last
        sampled one.
        """
        pieces = [tokens[: k + 1]]
        while parent is not None and parent.call < 0:
            pieces.append(parent.token_ids)
            parent = parent.parent
        anchor = b"" if parent is None else f"c{parent.call}+{parent.offset + len(parent)}".encode()
        digest = hashlib.blake2b(anchor, digest_size=8)
        for piece in reversed(pieces):
            digest.update(piece.tobytes())
        return f"g{digest.hexdigest()}"
