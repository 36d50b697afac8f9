"""Roles: what a branch is to the execution, from what was recorded and where the branch comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre_sdk.wire.records import Role

if TYPE_CHECKING:
    from gyre_sdk.graph.state import GraphState

ROLES: tuple[Role, ...] = ("main", "main-summary", "subagent", "subagent-summary", "auxiliary")

_BODY: dict[Role, Role] = {"main-summary": "main", "subagent-summary": "subagent"}
# Which link tells most about where a call comes from.
_ORDER = {"retries": 0, "forks": 1, "compacts": 2, "rerenders": 3, "returns": 4}


def body_role(role: Role) -> Role:
    """The role of the work that a summary belongs to: `main` for `main-summary`."""
    return _BODY.get(role, role)


def summary_role(role: Role) -> Role:
    """The role of a summary of such work."""
    if role == "main":
        return "main-summary"
    return "subagent-summary" if role == "subagent" else role


def role_of_call(graph: GraphState, call: int, known: dict[int, Role]) -> Role:
    """A recorded label decides. Else a retry is what the first try was, a forked call is a subagent, a call
    after a compaction is what was compacted, and otherwise a call is what the call was whose reply it builds
    on. A context from nowhere is `main`.

    `known` holds the roles of all calls up to its last one and is filled on; the caller cuts it when the
    graph changes.
    """
    if call not in known:
        last = next(reversed(known), -1)
        # Links and bases lead from smaller to larger numbers, so one pass in order suffices.
        for number in sorted(n for n in graph.calls if last < n <= call):
            label = graph._labels.get(number)
            known[number] = label[1] if label is not None else _inherited(graph, number, known)
    return known[call]


def _inherited(graph: GraphState, number: int, known: dict[int, Role]) -> Role:
    for link in sorted(graph.links_to(number), key=lambda k: (_ORDER[k.kind], -k.source)):
        source = known.get(link.source)
        if source is None:
            continue
        if link.kind == "forks":
            return "subagent"
        if link.kind == "compacts":
            return body_role(source)
        if link.kind in ("retries", "rerenders"):
            return source
    call = graph.calls[number]
    parent = graph.parent_call(number) if call.done else call.base_call
    return known.get(parent, "main")
