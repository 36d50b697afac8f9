"""The branch graph of one execution: a pure fold of its records.

Every reader builds it the same way (live gateway, restarted gateway, terminal, backend): `apply` each record
of the WAL. Only finished calls are in the tree; a call that is pending or failed is listed in `calls` and has
no nodes. The result does not depend on the order in which independent records are applied, as long as a
call's intent, result and what builds on it follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from gyre_sdk.errors import GraphError
from gyre_sdk.graph import folding, roles, views
from gyre_sdk.graph.nodes import NO_IDS, Call, CallLink, Int32, Leaf, Node
from gyre_sdk.graph.resolve import ResolvedPrefix, resolve
from gyre_sdk.graph.tree import ROOT, TokenTree
from gyre_sdk.wire.records import Event, Failed, Intent, Labelled, Link, Opened, Outcome, Record, Result, Role, Sealed

if TYPE_CHECKING:
    import networkx as nx


class BranchGraph:
    """The branch graph of one execution. `keep_bodies` also keeps each call's recorded request and reply (for
    viewers).
    """

    def __init__(self, *, keep_bodies: bool = False) -> None:
        self.keep_bodies = keep_bodies
        self.opened: Opened | None = None
        self.sealed: Sealed | None = None
        self.events: list[Event] = []
        self._calls: dict[int, Call] = {}
        self._labels: dict[int, tuple[float, Role, str]] = {}
        self._links: dict[int, set[CallLink]] = {}
        self._tree = TokenTree(self._calls)
        self._roles: dict[int, Role] = {}

    @classmethod
    def replay(cls, records: Iterable[Record], *, keep_bodies: bool = False) -> BranchGraph:
        """The graph of these records. Raises GraphError when they do not fit together."""
        graph = cls(keep_bodies=keep_bodies)
        for record in records:
            graph.apply(record)
        return graph

    # -- the fold ------------------------------------------------------------------------------------------

    def check(self, record: Record) -> None:
        """Raises GraphError when `apply` would; changes nothing. Writers call it before they write."""
        folding.check(self, record)

    def apply(self, record: Record) -> None:
        """Take one record. Raises GraphError, changing nothing, when it does not fit what was applied
        before.
        """
        folding.check(self, record)
        folding.fold(self, record)
        self._forget_roles(record)

    # -- what it holds -------------------------------------------------------------------------------------

    @property
    def execution(self) -> str:
        """The execution's id; empty before the first record."""
        return self.opened.execution if self.opened else ""

    @property
    def outcome(self) -> Outcome | None:
        """How the execution ended, once it has."""
        return self.sealed.outcome if self.sealed else None

    @property
    def calls(self) -> Mapping[int, Call]:
        """All calls by number: pending, done and failed."""
        return MappingProxyType(self._calls)

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All nodes by id."""
        return MappingProxyType(self._tree.nodes)

    @property
    def roots(self) -> tuple[Node, ...]:
        """Nodes in which contexts begin."""
        return tuple(self._tree.roots())

    @property
    def labels(self) -> Mapping[int, tuple[Role, str]]:
        """Roles that were recorded, with the reason, by call."""
        return {call: (role, reason) for call, (_, role, reason) in sorted(self._labels.items())}

    @property
    def unique_tokens(self) -> int:
        """Tokens stored: each once."""
        return sum(map(len, self._tree.nodes.values()))

    @property
    def flattened_tokens(self) -> int:
        """Tokens that all branches have together: what training without sharing would compute."""
        return sum(leaf.num_tokens for leaf in self.leaves())

    def links(self) -> list[CallLink]:
        """Typed edges between calls other than `continues`, sorted: recorded ones, and re-renders that
        intents tell of.
        """
        return [link for number in sorted(self._calls) for link in self.links_to(number)]

    def links_to(self, call: int) -> list[CallLink]:
        """The typed edges that lead to one call, sorted."""
        found = set(self._links.get(call, ()))
        entry = self._calls[call]
        if entry.rerender and entry.rerender_of >= 0:
            found.add(CallLink("rerenders", entry.rerender_of, call, entry.rerender))
        return sorted(found, key=lambda k: (k.source, k.kind, k.reason, k.inferred))

    # -- looking up ----------------------------------------------------------------------------------------

    def call_length(self, call: int) -> int:
        """Length of a finished call's prompt plus output."""
        entry = self._calls[call]
        return entry.prompt_tokens + len(entry.output_ids)

    def resolve(self, token_ids: Int32, *, base_call: int = -1, base_len: int = 0) -> ResolvedPrefix:
        """The longest token-identical path for a prompt; changes nothing.

        With a base, `token_ids` are only what follows the first `base_len` tokens of (prompt + output) of
        `base_call`, and the cost is O(what follows). Raises GraphError for a base that is not finished or
        shorter.
        """
        start = ROOT if base_call < 0 else self._tree.place(*folding.base_end(self, base_call, base_len))
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        place, sampled = resolve(self._tree, tokens, start)
        if place.node is None:
            return ResolvedPrefix(-1, 0, "", len(tokens) == 0, 0)
        whole = place.length == start.length + len(tokens)
        return ResolvedPrefix(place.node.owner, place.length, place.node.id, whole, sampled)

    def path_nodes(self, call: int) -> tuple[Node, ...]:
        """Root to end of a finished call's prompt and output. Empty when both are, or when the call is not
        finished.
        """
        nodes = []
        node = self._calls[call].last
        while node is not None:
            nodes.append(node)
            node = node.parent
        return tuple(reversed(nodes))

    def path_tokens(self, call: int) -> Int32:
        """int32: the prompt and the whole output of a finished call; the prompt alone of a pending one, newly
        made.

        Raises GraphError for a failed or unknown call.
        """
        entry = self._calls.get(call)
        if entry is None or entry.state == "failed":
            raise GraphError(f"call {call} has no tokens in the graph")
        if entry.done:
            return _joined([node.token_ids for node in self.path_nodes(call)])
        return self.prompt_ids(call)

    def prompt_ids(self, call: int) -> Int32:
        """int32: the prompt of a finished or pending call, newly made."""
        entry = self._calls.get(call)
        if entry is None or entry.state == "failed":
            raise GraphError(f"call {call} has no tokens in the graph")
        if entry.done:
            return self.path_tokens(call)[: entry.prompt_tokens]
        if entry.base_call < 0:
            return entry.delta.copy()
        return _joined([self.path_tokens(entry.base_call)[: entry.base_len], entry.delta])

    def parent_call(self, call: int) -> int:
        """The call whose sampled tokens come last in this finished call's prompt; -1 when none do."""
        entry = self._calls[call]
        node = entry.last if entry.first is None else entry.first.parent
        while node is not None and node.call < 0:
            node = node.parent
        return -1 if node is None else node.call

    def extended(self, call: int) -> bool:
        """Whether a later context holds any of the call's output."""
        node = self._calls[call].first
        while node is not None:
            onward = None
            for child in node.children():
                if child.call != node.call:
                    return True
                onward = child
            if node.enders:
                return True
            node = onward
        return False

    # -- branches ------------------------------------------------------------------------------------------

    def leaves(self) -> list[Leaf]:
        """The ends of all branches, by the number of their call: exactly what selection needs."""
        found = []
        for call in self._calls.values():
            last = call.last
            if last is None or last.given or last.sampled:
                continue
            if last.call < 0 and last.enders and call.number != min(last.enders):
                continue
            if last.call >= 0 and last.call != call.number:
                continue
            found.append(self._leaf(call))
        return sorted(found, key=lambda leaf: leaf.call)

    def _leaf(self, call: Call) -> Leaf:
        assert call.last is not None
        return Leaf(
            id=call.last.id,
            call=call.number,
            role=self.role_of_call(call.number),
            orphan=call.delivered is not True,
            nodes=self.path_nodes(call.number),
            calls=self._calls,
        )

    def orphan(self, call: int) -> bool:
        """A finished reply that was never delivered whole nor built upon."""
        entry = self._calls[call]
        return entry.done and entry.delivered is not True and not self.extended(call)

    def role(self, leaf: Leaf | str) -> Role:
        """The role of a leaf, given as such or by its id. Raises GraphError for an id that is no leaf's."""
        if isinstance(leaf, Leaf):
            return self.role_of_call(leaf.call)
        for candidate in self.leaves():
            if candidate.id == leaf:
                return candidate.role
        raise GraphError(f"no leaf {leaf!r}")

    def role_of_call(self, call: int) -> Role:
        """The role of a call: recorded, else that of where it comes from, else `main` for the first
        context.
        """
        return roles.role_of_call(self, call, self._roles)

    def _forget_roles(self, record: Record) -> None:
        """Roles follow from smaller to larger numbers: what a record tells of a call concerns that call and
        later ones.
        """
        match record:
            case Intent() | Result() | Failed() | Labelled():
                first = record.call
            case Link():
                first = record.target
            case _:
                return
        while self._roles and next(reversed(self._roles)) >= first:
            self._roles.popitem()

    # -- other forms ---------------------------------------------------------------------------------------

    def to_networkx(self) -> nx.DiGraph:
        """A new `networkx.DiGraph`: see `gyre_sdk.graph.views.to_networkx`."""
        return views.to_networkx(self)

    def digest(self) -> str:
        """Hex digest of a canonical form of all of it: equal for equal graphs, whatever the order of their
        records.
        """
        return views.digest(self)


def _joined(parts: list[Int32]) -> Int32:
    return np.concatenate(parts) if parts else NO_IDS.copy()
