"""A tree plan: the taken paths as one packed prefix forest, and the edges that enter the loss.

Each unique token is stored once, in depth-first order, so the descendants of a segment are one contiguous
range. A *segment* is a maximal unbranched run of packed tokens. An *edge* is (source token, target id): the
hidden state at the source predicts the target; a branch point with k continuations is the source of k edges.
Edges are keyed by (execution, call, index), never by token value: two samples that agree share their compute
and keep their two loss terms.

Shapes: U unique tokens, N segments, E edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgspec
import numpy as np

from gyre_backend.errors import PlanError
from gyre_backend.select.credit import Credit
from gyre_backend.select.paths import TrainPath

FORMAT = 1

_DTYPES = {
    "ids": "<i4",
    "pos": "<i4",
    "mult": "<i4",
    "seg_start": "<i4",
    "seg_end": "<i4",
    "seg_parent": "<i4",
    "seg_sub_end": "<i4",
    "seg_depth": "<i4",
    "edge_src": "<i4",
    "edge_tgt": "<i4",
    "edge_w": "<f8",
    "edge_adv": "<f8",
    "edge_old_logp": "<f4",
    "edge_exec": "<i4",
    "edge_version": "<i4",
    "edge_call": "<i4",
    "edge_index": "<i4",
}
EDGE_FIELDS = tuple(name for name in _DTYPES if name.startswith("edge_"))


class Segment(NamedTuple):
    """`[start, end)` are its own packed tokens, `[end, sub_end)` all its descendants; `parent` is -1 for a
    root."""

    start: int
    end: int
    sub_end: int
    parent: int
    depth: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TreePlan:
    """See the module's docstring. Compared and hashed by identity, so that layouts can be cached per plan."""

    ids: np.ndarray
    """int32[U]: token ids in depth-first order"""
    pos: np.ndarray
    """int32[U]: position on the token's path = number of its ancestors"""
    mult: np.ndarray
    """int32[U]: how many taken paths hold the token"""
    seg_start: np.ndarray
    """int32[N]"""
    seg_end: np.ndarray
    """int32[N]"""
    seg_parent: np.ndarray
    """int32[N]: -1 for a root"""
    seg_sub_end: np.ndarray
    """int32[N]"""
    seg_depth: np.ndarray
    """int32[N]: number of ancestor segments"""
    edge_src: np.ndarray
    """int32[E]: packed index of the source token"""
    edge_tgt: np.ndarray
    """int32[E]: id of the target token"""
    edge_w: np.ndarray
    """float64[E]: 1/T_e; the division by the number of executions happens once, at the step's end"""
    edge_adv: np.ndarray
    """float64[E]"""
    edge_old_logp: np.ndarray
    """float32[E]: the sampler's logprob"""
    edge_exec: np.ndarray
    """int32[E]: index into `executions`"""
    edge_version: np.ndarray
    """int32[E]: policy version that sampled the target"""
    edge_call: np.ndarray
    """int32[E]"""
    edge_index: np.ndarray
    """int32[E]: position in the call's output"""
    executions: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_edges(self) -> int:
        return len(self.edge_src)

    @property
    def flat_tokens(self) -> int:
        """Tokens that path-by-path training would compute."""
        return int(self.mult.sum())

    @property
    def sharing(self) -> float:
        """1 - unique tokens / flattened tokens: the share of a flat layout's tokens that the tree does not
        compute."""
        return 1.0 - self.num_tokens / self.flat_tokens if self.num_tokens else 0.0

    def segments(self) -> list[Segment]:
        """Segments in depth-first order."""
        columns = (self.seg_start, self.seg_end, self.seg_sub_end, self.seg_parent, self.seg_depth)
        return [Segment(*row) for row in zip(*(column.tolist() for column in columns))]

    def edge_keys(self) -> set[tuple[str, int, int]]:
        """(execution, call, index) of every edge."""
        rows = zip(self.edge_exec.tolist(), self.edge_call.tolist(), self.edge_index.tolist())
        return {(self.executions[e], call, index) for e, call, index in rows}


def build_plan(
    paths: Sequence[TrainPath],
    advantages: Mapping[str, float],
    *,
    credit: Credit | None = None,
    weighting: str = "execution",
    merge: bool = True,
    max_shared: Sequence[int] | None = None,
) -> TreePlan:
    """The prefix forest of `paths`. T_e counts every trained token of an execution in `paths`: pass all of an
    execution's paths at once.

    Tokens after a path's last trained one can't matter (attention is causal) and are left out. `merge=False`
    gives the flat layout: every path computed on its own;
    `max_shared` caps, per path, how many of its first tokens may be shared. Raises PlanError for a path that
    trains its first token (nothing predicts it), for a token trained twice and for an execution without an
    advantage.
    """
    caps = [len(path.call) for path in paths] if max_shared is None else list(max_shared)
    caps = [cap if merge else 0 for cap, path in zip(caps, paths, strict=True) if path.trained]
    paths = [path for path in paths if path.trained]
    executions = tuple(dict.fromkeys(path.execution for path in paths))
    for path in paths:
        if path.execution not in advantages:
            raise PlanError(f"execution {path.execution} has trained tokens but no advantage")
        if path.call[0] >= 0:
            raise PlanError(
                f"execution {path.execution}: the first token of a path can't be trained, nothing predicts it"
            )
    lengths = [int(np.flatnonzero(path.call >= 0)[-1]) + 1 for path in paths]
    trie = _heavy_first(_Trie.of([path.token_ids[:n] for path, n in zip(paths, lengths)], caps))
    edges = _edges_of(paths, trie, executions, advantages, credit, weighting)
    return assemble(trie.ids, trie.parent, trie.mult, edges, executions)


def assemble(
    ids: np.ndarray,
    parent: np.ndarray,
    mult: np.ndarray,
    edges: Mapping[str, np.ndarray],
    executions: tuple[str, ...],
) -> TreePlan:
    """A plan from packed tokens in depth-first order, each with its parent's packed index (-1: a root), and
    edge columns.

    Raises PlanError if they break a rule.
    """
    plan = TreePlan(**_segment_arrays(_Trie(ids, parent, mult, [])), **edges, executions=executions)
    validate(plan)
    return plan


def validate(plan: TreePlan) -> None:
    """Raise PlanError if the plan breaks a rule that exactness rests on."""
    tokens, count = plan.num_tokens, len(plan.seg_start)
    for name, dtype in _DTYPES.items():
        array, size = getattr(plan, name), {"s": count, "e": plan.num_edges}.get(name[0], tokens)
        if array.shape != (size,) or array.dtype != np.dtype(dtype):
            raise PlanError(f"plan.{name} is {array.dtype}{array.shape}, wanted {np.dtype(dtype)}({size},)")
    if tokens == 0:
        return
    start, end, parent, sub_end = plan.seg_start, plan.seg_end, plan.seg_parent, plan.seg_sub_end
    if start[0] != 0 or end[-1] != tokens or (start[1:] != end[:-1]).any() or (start >= end).any():
        raise PlanError("segments must tile the packed tokens in order")
    if (parent >= np.arange(count)).any() or (sub_end < end).any() or sub_end.max() > tokens:
        raise PlanError("segments must be in depth-first order")
    child = np.flatnonzero(parent >= 0)
    if (sub_end[child] > sub_end[parent[child]]).any() or (start[child] < end[parent[child]]).any():
        raise PlanError("a segment reaches outside its parent's range")
    base = np.zeros(count, np.int64)
    base[child] = plan.pos[end[parent[child]] - 1] + 1
    owner = np.repeat(np.arange(count), end - start)
    if (plan.pos != base[owner] + np.arange(tokens) - start[owner]).any():
        raise PlanError("a token's position must be the number of its ancestors")
    if plan.num_edges:
        _validate_edges(plan)


def _validate_edges(plan: TreePlan) -> None:
    if plan.edge_src.min() < 0 or plan.edge_src.max() >= plan.num_tokens:
        raise PlanError("an edge's source is outside the plan")
    if len(plan.edge_keys()) != plan.num_edges:
        raise PlanError("a sampled token enters the loss twice: (execution, call, index) must be unique")
    if not (np.isfinite(plan.edge_w).all() and np.isfinite(plan.edge_adv).all() and (plan.edge_w > 0).all()):
        raise PlanError("edge weights and advantages must be finite, weights positive")
    if not np.isfinite(plan.edge_old_logp).all():
        raise PlanError("a trained token has no sampler logprob")
    edge_child(plan)


def token_parents(plan: TreePlan) -> np.ndarray:
    """int64[U]: packed index of each token's parent, -1 at a root."""
    parents = np.arange(plan.num_tokens, dtype=np.int64) - 1
    up = plan.seg_parent
    parents[plan.seg_start] = np.where(up >= 0, plan.seg_end[up] - 1, -1)
    return parents


def edge_child(plan: TreePlan) -> np.ndarray:
    """int64[E]: packed index of the token each edge predicts: the child of its source with the target's id.

    PlanError if there is none.
    """
    parents = token_parents(plan)
    key_of_token = (parents << 32) | plan.ids.astype(np.int64)
    order = np.argsort(key_of_token, kind="stable")
    wanted = (plan.edge_src.astype(np.int64) << 32) | plan.edge_tgt.astype(np.int64)
    at = np.minimum(np.searchsorted(key_of_token, wanted, sorter=order), plan.num_tokens - 1)
    child = order[at]
    if (key_of_token[child] != wanted).any():
        raise PlanError("an edge's target is not a child of its source")
    return child


def flatten_plan(plan: TreePlan) -> TreePlan:
    """The oracle: the same edges, with every taken path computed on its own (no sharing)."""
    parents = token_parents(plan)
    ends_here = plan.mult.astype(np.int64)
    np.subtract.at(ends_here, parents[parents >= 0], plan.mult[parents >= 0])
    chains = [chain_of(parents, end) for end in np.flatnonzero(ends_here).tolist() for _ in range(ends_here[end])]
    where: dict[int, int] = {}
    offset = 0
    for chain in chains:
        for place, token in enumerate(chain.tolist()):
            where.setdefault(token, offset + place)
        offset += len(chain)
    starts = np.cumsum([0, *map(len, chains)])[:-1]
    before = [np.concatenate([[-1], np.arange(len(chain) - 1) + s]) for chain, s in zip(chains, starts)]
    edges = {name: getattr(plan, name) for name in EDGE_FIELDS}
    # An edge goes where its *target* was placed first: the token before it there is its source.
    edges["edge_src"] = np.array([where[token] - 1 for token in edge_child(plan).tolist()], np.int32)
    none = np.zeros(0, np.int64)
    ids, parent = np.concatenate([none, *(plan.ids[chain] for chain in chains)]), np.concatenate([none, *before])
    return assemble(ids, parent, np.ones(offset, np.int64), edges, plan.executions)


def chain_of(parents: np.ndarray, end: int) -> np.ndarray:
    """int64[n]: the path from the root down to packed token `end`."""
    chain = []
    token = int(end)
    while token >= 0:
        chain.append(token)
        token = int(parents[token])
    return np.array(chain[::-1], np.int64)


def merge_plans(plans: Iterable[TreePlan]) -> TreePlan:
    """One forest of several plans over different executions, side by side (nothing is shared between
    them)."""
    plans = list(plans)
    executions = tuple(execution for plan in plans for execution in plan.executions)
    if len(set(executions)) != len(executions):
        raise PlanError("plans to merge must hold different executions")
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    tokens = segments = held = 0
    for plan in plans:
        shift = {
            "seg_start": tokens,
            "seg_end": tokens,
            "seg_sub_end": tokens,
            "edge_src": tokens,
            "edge_exec": held,
        }
        for name, dtype in _DTYPES.items():
            column = getattr(plan, name) + shift.get(name, 0)
            if name == "seg_parent":
                column = np.where(column >= 0, column + segments, -1)
            arrays[name].append(column.astype(dtype))
        tokens, segments, held = (
            tokens + plan.num_tokens,
            segments + len(plan.seg_start),
            held + len(plan.executions),
        )
    return TreePlan(
        **{name: np.concatenate(parts) if parts else np.zeros(0, _DTYPES[name]) for name, parts in arrays.items()},
        executions=executions,
    )


class _Wire(msgspec.Struct, array_like=True):
    format: int
    executions: tuple[str, ...]
    arrays: dict[str, bytes]


def plan_to_bytes(plan: TreePlan) -> bytes:
    """msgpack of raw little-endian arrays."""
    arrays = {name: np.ascontiguousarray(getattr(plan, name), dtype).tobytes() for name, dtype in _DTYPES.items()}
    return msgspec.msgpack.encode(_Wire(FORMAT, plan.executions, arrays))


def plan_from_bytes(data: bytes) -> TreePlan:
    """Inverse of `plan_to_bytes`. Raises PlanError for anything else."""
    try:
        wire = msgspec.msgpack.decode(data, type=_Wire)
    except msgspec.MsgspecError as error:
        raise PlanError(f"not a tree plan: {error}") from error
    if wire.format != FORMAT or set(wire.arrays) != set(_DTYPES):
        raise PlanError(f"tree plan of format {wire.format}, wanted {FORMAT}")
    plan = TreePlan(
        **{name: np.frombuffer(wire.arrays[name], dtype) for name, dtype in _DTYPES.items()},
        executions=wire.executions,
    )
    validate(plan)
    return plan


@dataclass(frozen=True, slots=True)
class _Trie:
    ids: np.ndarray
    parent: np.ndarray
    mult: np.ndarray
    packed: list[np.ndarray]
    """per path, in the caller's order: packed index of each of its tokens"""

    @classmethod
    def of(cls, token_ids: Sequence[np.ndarray], caps: Sequence[int]) -> _Trie:
        """Sort the paths; each adds what it does not share with its predecessor in that order."""
        # Big-endian bytes of non-negative ids sort like the ids.
        order = sorted(range(len(token_ids)), key=lambda i: token_ids[i].astype(">u4").tobytes())
        ids: list[np.ndarray] = []
        parent: list[np.ndarray] = []
        packed: list[np.ndarray] = [np.zeros(0, np.int64)] * len(token_ids)
        last = np.zeros(0, np.int64)
        last_ids = np.zeros(0, np.int32)
        total = 0
        for i in order:
            now = token_ids[i]
            shared = min(_common_prefix(last_ids, now), caps[i])
            new = np.arange(total, total + len(now) - shared)
            packed[i] = np.concatenate([last[:shared], new])
            ids.append(now[shared:])
            before = packed[i][shared - 1] if shared else -1
            parent.append(np.concatenate([[before], new[:-1]])[: len(new)])
            total += len(new)
            last, last_ids = packed[i], now
        mult = np.zeros(total, np.int64)
        for path in packed:
            mult[path] += 1
        empty = np.zeros(0, np.int64)
        return cls(np.concatenate([empty, *ids]), np.concatenate([empty, *parent]).astype(np.int64), mult, packed)


def _heavy_first(trie: _Trie) -> _Trie:
    """The same forest with the largest child of every branch point first: then attention takes the fewest,
    largest blocks."""
    columns = _segment_arrays(trie)
    start, end, parent = (columns[name].tolist() for name in ("seg_start", "seg_end", "seg_parent"))
    size = (columns["seg_sub_end"] - columns["seg_start"]).tolist()
    children: dict[int, list[int]] = {}
    for segment, above in enumerate(parent):
        children.setdefault(above, []).append(segment)
    order: list[int] = []
    waiting = children.get(-1, [])[::-1]
    while waiting:
        segment = waiting.pop()
        order.append(segment)
        below = children.get(segment, [])
        heavy = max(below, key=size.__getitem__, default=None)
        waiting += [child for child in reversed(below) if child != heavy]
        if heavy is not None:
            waiting.append(heavy)
    old = np.concatenate([np.zeros(0, np.int64), *(np.arange(start[segment], end[segment]) for segment in order)])
    new = np.empty_like(old)
    new[old] = np.arange(len(old))
    above_old = trie.parent[old]
    moved = np.where(above_old >= 0, new[np.maximum(above_old, 0)], -1) if len(old) else above_old
    return _Trie(trie.ids[old], moved, trie.mult[old], [new[path] for path in trie.packed])


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _segment_arrays(trie: _Trie) -> dict[str, np.ndarray]:
    parent, tokens = trie.parent, len(trie.ids)
    children = np.bincount(parent[parent >= 0], minlength=tokens)
    previous = np.arange(tokens) - 1
    opens = (parent != previous) | (parent < 0)
    opens |= children[np.maximum(parent, 0)] >= 2
    start = np.flatnonzero(opens)
    end = np.append(start[1:], tokens)[: len(start)]
    owner = np.cumsum(opens) - 1
    up = parent[start]
    seg_parent = np.where(up >= 0, owner[np.maximum(up, 0)], -1) if tokens else up
    depth, sub_end, pos0 = np.zeros(len(start), np.int64), end.copy(), np.zeros(len(start), np.int64)
    for i, above in enumerate(seg_parent.tolist()):
        if above >= 0:
            depth[i] = depth[above] + 1
            pos0[i] = pos0[above] + end[above] - start[above]
    for i in range(len(start) - 1, -1, -1):
        above = seg_parent[i]
        if above >= 0:
            sub_end[above] = max(sub_end[above], sub_end[i])
    pos = pos0[owner] + np.arange(tokens) - start[owner] if tokens else pos0
    columns = {"ids": trie.ids, "pos": pos, "mult": trie.mult, "seg_start": start, "seg_end": end}
    columns |= {"seg_parent": seg_parent, "seg_sub_end": sub_end, "seg_depth": depth}
    return {name: np.ascontiguousarray(column, _DTYPES[name]) for name, column in columns.items()}


def _weights(paths: Sequence[TrainPath], weighting: str) -> dict[str, float]:
    """Weight of every edge of each execution."""
    trained: dict[str, int] = {}
    group = {path.execution: path.group for path in paths}
    for path in paths:
        trained[path.execution] = trained.get(path.execution, 0) + path.trained
    if weighting == "execution":
        return {execution: 1.0 / count for execution, count in trained.items()}
    if weighting == "token":
        members: dict[str, list[int]] = {}
        for execution, count in trained.items():
            members.setdefault(group[execution], []).append(count)
        return {e: len(members[group[e]]) / sum(members[group[e]]) for e in trained}
    try:
        constant = 1.0 / float(weighting)
    except (ValueError, ZeroDivisionError):
        raise PlanError(f"weighting = {weighting!r}: wanted execution, token or a number of tokens") from None
    return dict.fromkeys(trained, constant)


def _edges_of(
    paths: Sequence[TrainPath],
    trie: _Trie,
    executions: tuple[str, ...],
    advantages: Mapping[str, float],
    credit: Credit | None,
    weighting: str,
) -> dict[str, np.ndarray]:
    weight = _weights(paths, weighting)
    number = {execution: i for i, execution in enumerate(executions)}
    columns: dict[str, list[np.ndarray]] = {name: [np.zeros(0)] for name in EDGE_FIELDS}
    for path, packed in zip(paths, trie.packed):
        at = np.flatnonzero(path.call >= 0)
        advantage = advantages[path.execution]
        per_token = np.full(len(path.call), advantage) if credit is None else credit(path, advantage)
        ones = np.ones(len(at))
        columns["edge_src"].append(packed[at - 1])
        columns["edge_tgt"].append(path.token_ids[at])
        columns["edge_w"].append(ones * weight[path.execution])
        columns["edge_adv"].append(per_token[at])
        columns["edge_old_logp"].append(path.old_logprobs[at])
        columns["edge_exec"].append(ones * number[path.execution])
        columns["edge_version"].append(path.versions[at])
        columns["edge_call"].append(path.call[at])
        columns["edge_index"].append(path.index[at])
    edges = {name: np.concatenate(parts).astype(_DTYPES[name]) for name, parts in columns.items()}
    order = np.lexsort((edges["edge_index"], edges["edge_call"], edges["edge_exec"], edges["edge_src"]))
    return {name: column[order] for name, column in edges.items()}


assert {field.name for field in fields(TreePlan)} == {*_DTYPES, "executions"}
