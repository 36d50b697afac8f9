"""The branch graph: what an execution really sampled, each token once, and why its branches exist."""

from gyre_sdk.graph.branch_graph import BranchGraph
from gyre_sdk.graph.nodes import Call, CallLink, Leaf, Node, PathArrays
from gyre_sdk.graph.resolve import ResolvedPrefix
from gyre_sdk.graph.roles import ROLES, body_role, summary_role

__all__ = [
    "ROLES",
    "BranchGraph",
    "Call",
    "CallLink",
    "Leaf",
    "Node",
    "PathArrays",
    "ResolvedPrefix",
    "body_role",
    "summary_role",
]
