"""What a branch graph knows, and the plain questions it answers. `BranchGraph` adds the fold and everything
derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from gyre_sdk.errors import GraphError
from gyre_sdk.graph.nodes import NO_IDS, Call, CallLink, Int32, Node
from gyre_sdk.graph.tree import TokenTree
from gyre_sdk.wire.records import Event, Opened, Outcome, Role, Sealed


class GraphState:
    """Calls, their tokens, links and labels of one execution."""

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

    def call_length(self, call: int) -> int:
        """Length of a finished call's prompt plus output."""
        entry = self._calls[call]
        return entry.prompt_tokens + len(entry.output_ids)

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

    def orphan(self, call: int) -> bool:
        """A finished reply that was never delivered whole nor built upon."""
        entry = self._calls[call]
        return entry.done and entry.delivered is not True and not self.extended(call)


def _joined(parts: list[Int32]) -> Int32:
    return np.concatenate(parts) if parts else NO_IDS.copy()
