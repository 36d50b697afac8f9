"""Cutting a plan into pieces that train to the same gradient: under a token cap (`split_dfs`), over ranks
(`balance`).

A piece is a range [a, b) of packed tokens together with the ancestors of its first token as context: in
depth-first order those are all the ancestors that the range lacks, pos[a] of them. Each edge belongs to the
piece that holds its target, so pieces add up to the whole. Tokens under which no edge of the piece lies are
left out.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np

from gyre_backend.errors import PlanError
from gyre_backend.tree.cost import CostModel
from gyre_backend.tree.plan import EDGE_FIELDS, TreePlan, assemble, edge_child, token_parents


def split_dfs(
    plan: TreePlan, max_tokens: int, *, max_path: int | None = None, whole_replies: bool = False
) -> list[TreePlan]:
    """Pieces of at most `max_tokens` packed tokens each, with the least context computed twice.

    `max_path` caps path length apart from the packed size. `whole_replies` keeps all edges of a reply in one
    piece, for losses with a ratio per reply. Raises PlanError if no such split exists: a path (or a reply
    with its context) is longer.
    """
    longest = int(plan.pos.max()) + 1 if plan.num_tokens else 0
    if max_path is not None and longest > max_path:
        raise PlanError(f"a path of {longest} tokens exceeds max_path = {max_path}")
    if plan.num_tokens <= max_tokens:
        return [plan] if plan.num_edges else []
    if longest > max_tokens:
        raise PlanError(
            f"a path of {longest} tokens does not fit max_tokens = {max_tokens}; raise it, or use bounded_memory"
        )
    cuts = _cheapest_cuts(plan.pos, np.flatnonzero(_may_cut(plan, whole_replies)), max_tokens)
    return _pieces(plan, cuts)


def _may_cut(plan: TreePlan, whole_replies: bool) -> np.ndarray:
    """bool[U]: a piece may begin at this token."""
    if not whole_replies or not plan.num_edges:
        return np.ones(plan.num_tokens, bool)
    child = edge_child(plan)
    keys = np.stack([plan.edge_exec, plan.edge_call])
    reply = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    first = np.full(reply.max() + 1, plan.num_tokens)
    last = np.zeros(reply.max() + 1, np.int64)
    np.minimum.at(first, reply, child)
    np.maximum.at(last, reply, child)
    inside = np.zeros(plan.num_tokens + 2, np.int64)  # a cut at t parts a reply if first < t <= last
    np.add.at(inside, first + 1, 1)
    np.add.at(inside, last + 1, -1)
    allowed: np.ndarray = np.cumsum(inside)[: plan.num_tokens] == 0
    return allowed


def _cheapest_cuts(pos: np.ndarray, allowed: np.ndarray, max_tokens: int) -> list[int]:
    """Begins of the pieces. Dynamic programme: pieces [a, b) with b - a + pos[a] <= max_tokens, least sum of
    pos[a] + 1.

    a - pos[a] never falls along the depth-first order, so the feasible a of each b are a sliding window.
    """
    tokens = len(pos)
    places = [*allowed.tolist(), tokens]
    total = dict.fromkeys(places, 0)
    before: dict[int, int] = {}
    window: deque[int] = deque()
    for a, b in pairwise(places):
        while window and total[window[-1]] >= total[a]:
            window.pop()
        window.append(a)
        while window and b - window[0] + int(pos[window[0]]) > max_tokens:
            window.popleft()
        if not window:
            raise PlanError(f"no split into pieces of max_tokens = {max_tokens}: a reply with its context is longer")
        before[b] = window[0]
        total[b] = total[window[0]] + 1 + (int(pos[b]) if b < tokens else 0)
    cuts = [before[tokens]]
    while cuts[-1] > 0:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def balance(
    plan: TreePlan, ranks: int, model: CostModel, *, max_tokens: int | None = None, whole_replies: bool = False
) -> list[list[TreePlan]]:
    """Micro-batches per rank: contiguous depth-first ranges with the least maximum cost, the same number for
    every rank.

    Binary search on the maximum cost, filling greedily; the cost of a range is a difference of prefix sums,
    so each probe is `ranks` binary searches. A rank whose range needs fewer pieces than another's under
    `max_tokens` is cut finer; if there are fewer trained tokens than ranks, the last ranks get no piece.
    Merge plans first (`merge_plans`) to balance several groups.
    """
    allowed = np.flatnonzero(_may_cut(plan, whole_replies))
    sums = _Sums.of(plan, model)
    bounds = _min_max_cuts(sums, allowed, 0, plan.num_tokens, ranks)
    cutter = _Cutter(plan)
    shares = [cutter.piece(a, b) for a, b in pairwise(bounds)]
    cap = plan.num_tokens if max_tokens is None else max_tokens
    counts = [len(split_dfs(share, cap, whole_replies=whole_replies)) for share in shares]
    wanted = max(counts, default=0)
    result = []
    for share, count in zip(shares, counts):
        if count == wanted or count == 0:
            result.append(split_dfs(share, cap, whole_replies=whole_replies))
        else:
            result.append(_split_evenly(share, wanted, model, whole_replies))
    return result + [[] for _ in range(ranks - len(result))]


def _split_evenly(plan: TreePlan, count: int, model: CostModel, whole_replies: bool) -> list[TreePlan]:
    allowed = np.flatnonzero(_may_cut(plan, whole_replies))
    bounds = _min_max_cuts(_Sums.of(plan, model), allowed, 0, plan.num_tokens, count)
    cutter = _Cutter(plan)
    return [part for part in (cutter.piece(a, b) for a, b in pairwise(bounds)) if part.num_edges]


class _Sums:
    """Costs of ranges [a, b) in O(1): own(b) - own(a) + context(a)."""

    def __init__(self, own: np.ndarray, context: np.ndarray) -> None:
        self.own = own
        """float64[U + 1]: cost of the first t tokens and their edges"""
        self.context = context
        """float64[U]: cost of the ancestors of token a"""

    @classmethod
    def of(cls, plan: TreePlan, model: CostModel) -> _Sums:
        pos = plan.pos.astype(np.float64)
        edges = np.bincount(edge_child(plan), minlength=plan.num_tokens)
        each = model.per_token + model.per_pair * (pos + 1.0) + model.per_edge * edges
        context = model.per_token * pos + model.per_pair * pos * (pos + 1.0) / 2.0
        return cls(np.concatenate([[0.0], np.cumsum(each)]), context)

    def cost(self, a: int, b: int) -> float:
        return float(self.own[b] - self.own[a] + self.context[a])


def _min_max_cuts(sums: _Sums, allowed: np.ndarray, start: int, end: int, parts: int) -> list[int]:
    """Bounds of at most `parts` ranges that cover [start, end) with the least maximum cost (to one part in
    10^4)."""
    ends = np.append(allowed[(allowed > start) & (allowed < end)], end)

    def fill(limit: float) -> list[int] | None:
        bounds = [start]
        while bounds[-1] < end and len(bounds) <= parts:
            a = bounds[-1]
            reach = int(np.searchsorted(sums.own, limit - sums.context[a] + sums.own[a], side="right")) - 1
            at = int(np.searchsorted(ends, reach, side="right")) - 1
            if at < 0 or ends[at] <= a:
                return None
            bounds.append(int(ends[at]))
        return bounds if bounds[-1] == end else None

    high = sums.cost(start, end)
    low, best = high / parts, [start, end]
    while high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        bounds = fill(middle)
        if bounds is None:
            low = middle
        else:
            high, best = middle, bounds
    return best


def _pieces(plan: TreePlan, cuts: list[int]) -> list[TreePlan]:
    cutter = _Cutter(plan)
    parts = (cutter.piece(a, b) for a, b in pairwise([*cuts, plan.num_tokens]))
    return [part for part in parts if part.num_edges]


def piece(plan: TreePlan, a: int, b: int) -> TreePlan:
    """The edges whose targets are in [a, b), on the tokens they need."""
    return _Cutter(plan).piece(a, b)


class _Cutter:
    """Cuts pieces out of one plan: O(piece) each, after one pass over the plan."""

    def __init__(self, plan: TreePlan) -> None:
        self.plan = plan
        self.parents = token_parents(plan)
        child = edge_child(plan)
        self.order = np.argsort(child, kind="stable")
        self.child = child[self.order]
        self.owner = np.repeat(np.arange(len(plan.seg_start)), plan.seg_end - plan.seg_start)
        self.below = plan.seg_sub_end[self.owner]
        """int32[U]: the subtree of token u is [u, below[u])"""
        has_parent = self.parents >= 0
        self.ends = plan.mult.astype(np.int64)
        """int64[U]: paths that end at the token"""
        np.subtract.at(self.ends, self.parents[has_parent], plan.mult[has_parent])

    def piece(self, a: int, b: int) -> TreePlan:
        plan = self.plan
        first, last = np.searchsorted(self.child, [a, b])
        child = self.child[first:last]
        held = np.concatenate([self._ancestors(a), np.arange(a, b)]) if a < b else np.zeros(0, np.int64)
        limit = np.minimum(self.below[held], b)
        # Without an edge in its subtree a token is not needed; the rest keeps its order.
        needed = np.searchsorted(child, limit) > np.searchsorted(child, held)
        held, limit = held[needed], limit[needed]
        parents = self.parents[held]
        parent = np.where(parents >= 0, np.searchsorted(held, parents), -1)
        edges = {name: getattr(plan, name)[self.order[first:last]] for name in EDGE_FIELDS}
        edges["edge_src"] = np.searchsorted(held, edges["edge_src"]).astype(np.int32)
        # Paths that end in the piece: as in the whole, and one where everything that followed was cut off.
        followed = np.bincount(parent[parent >= 0], minlength=len(held)) > 0
        ends = np.where(followed, np.where(held >= a, self.ends[held], 0), np.maximum(self.ends[held], 1))
        sums = np.concatenate([[0], np.cumsum(ends)])
        mult = sums[np.searchsorted(held, limit)] - sums[:-1]
        return assemble(plan.ids[held], parent, mult, edges, plan.executions)

    def _ancestors(self, token: int) -> np.ndarray:
        """int64[n]: root first, without the token itself."""
        plan, segment = self.plan, int(self.owner[token])
        runs = [np.arange(plan.seg_start[segment], token)]
        while (segment := int(plan.seg_parent[segment])) >= 0:
            runs.append(np.arange(plan.seg_start[segment], plan.seg_end[segment]))
        return np.concatenate(runs[::-1])
