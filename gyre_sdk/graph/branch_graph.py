"""The branch graph of one execution: a pure fold of its records.

Every reader builds it the same way (live gateway, restarted gateway, terminal, backend): `apply` each record
of the WAL. Only finished calls are in the tree; a call that is pending or failed is listed in `calls` and has
no nodes. The result does not depend on the order in which independent records are applied, as long as a
call's intent, result and what builds on it follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from gyre_sdk.errors import GraphError
from gyre_sdk.graph import folding, roles, views
from gyre_sdk.graph.nodes import Call, Int32, Leaf
from gyre_sdk.graph.resolve import ResolvedPrefix, resolve
from gyre_sdk.graph.state import GraphState
from gyre_sdk.graph.tree import ROOT
from gyre_sdk.wire.records import Failed, Intent, Labelled, Link, Record, Result, Role

if TYPE_CHECKING:
    import networkx as nx


class BranchGraph(GraphState):
    """The branch graph of one execution. `keep_bodies` also keeps each call's recorded request and reply (for
    viewers).
    """

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

    # -- looking up ----------------------------------------------------------------------------------------

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

    # -- branches ------------------------------------------------------------------------------------------

    @property
    def flattened_tokens(self) -> int:
        """Tokens that all branches have together: what training without sharing would compute."""
        return sum(leaf.num_tokens for leaf in self.leaves())

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
