"""A step in bounded memory: one segment at a time, depth first, with a stack of keys and values.

A segment with children is run once without a graph to get its keys and values, and once more, with one, after
its children: then the gradients that they sent to its keys and values join those of its own loss. Activations
of one segment and the keys and values of one path are held at once; internal segments are computed twice
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from gyre_backend.tree.attend import attend_after
from gyre_backend.tree.loss import Head, logprobs_at
from gyre_backend.tree.plan import Segment, TreePlan

SegmentForward = Callable[[np.ndarray, np.ndarray, "KVStack"], torch.Tensor]
"""(ids int32[n], positions int32[n], stack) -> last hidden states [n, d]; each attention layer calls
`stack.attend`"""

EdgeLossOf = Callable[[np.ndarray, torch.Tensor, torch.Tensor], torch.Tensor]
"""(edge numbers int[e], logprobs [e], entropies [e]) -> their scalar loss"""


@dataclass(slots=True)
class _Layer:
    """Keys, values and their gradients of the path's tokens: [1, Hkv, longest path, D] each."""

    k: torch.Tensor
    v: torch.Tensor
    grad_k: torch.Tensor
    grad_v: torch.Tensor


class KVStack:
    """What the ancestors of the running segment left for it, per attention layer."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.length = 0
        """tokens on the stack"""
        self.layers: dict[int, _Layer] = {}
        self.past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """of the running segment: the stack as leaves of its graph"""
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """of the running segment: its keys and values"""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of the running segment over the stack and itself. q: [1, Hq, n, D]; k, v: [1, Hkv, n,
        D]."""
        self.own[layer] = (k, v)
        if self.length == 0:
            return attend_after(q, k, v, scale)
        held = self.layers[layer]
        if layer not in self.past:  # a checkpointed layer comes here twice and must find the same leaves
            leaves = (held.k[:, :, : self.length].detach(), held.v[:, :, : self.length].detach())
            self.past[layer] = (leaves[0].requires_grad_(), leaves[1].requires_grad_())
        past_k, past_v = self.past[layer]
        return attend_after(q, torch.cat([past_k, k], 2), torch.cat([past_v, v], 2), scale)

    def start(self) -> None:
        """A segment is about to run."""
        self.past, self.own = {}, {}

    def push(self) -> None:
        """Put the running segment's keys and values on the stack, with zero gradients."""
        count = 0
        for layer, (k, v) in self.own.items():
            count = k.shape[2]
            here = slice(self.length, self.length + count)
            if layer not in self.layers:
                self.layers[layer] = self._new_layer(k, v)
            held = self.layers[layer]
            held.k[:, :, here], held.v[:, :, here] = k.detach(), v.detach()
            held.grad_k[:, :, here] = 0.0
            held.grad_v[:, :, here] = 0.0
        self.length += count

    def _new_layer(self, k: torch.Tensor, v: torch.Tensor) -> _Layer:
        wide = torch.promote_types(k.dtype, torch.float32)
        sizes = [(*t.shape[:2], self.longest, t.shape[3]) for t in (k, v)]
        return _Layer(
            k.new_empty(sizes[0]),
            v.new_empty(sizes[1]),
            k.new_empty(sizes[0], dtype=wide),
            v.new_empty(sizes[1], dtype=wide),
        )

    def pop(self, count: int) -> None:
        """Take the last `count` tokens off; their gradients stay readable until the next push."""
        self.length -= count

    def roots(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(key or value of the running segment, the gradient its descendants sent to it), after `pop`."""
        for layer, (k, v) in self.own.items():
            held, here = self.layers[layer], slice(self.length, self.length + k.shape[2])
            yield k, held.grad_k[:, :, here].to(k.dtype)
            yield v, held.grad_v[:, :, here].to(v.dtype)

    def collect(self) -> None:
        """Add the running segment's gradients for the stack to the stack's."""
        for layer, (past_k, past_v) in self.past.items():
            held = self.layers[layer]
            for total, leaf in ((held.grad_k, past_k), (held.grad_v, past_v)):
                if leaf.grad is not None:
                    total[:, :, : self.length] += leaf.grad


def dfs_step(
    forward: SegmentForward,
    head: Head,
    plan: TreePlan,
    loss_of: EdgeLossOf,
    *,
    chunk: int = 1024,
    train: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the plan's gradient to the model's, segment by segment: the same as in one piece, for a loss that
    is a sum over edges.

    Returns every edge's logprob and entropy, [E] each, without gradient. `train=False` only computes these: a
    loss that couples edges of different segments takes two passes, the second with the gradient of the
    first's logprobs as weights.
    """
    segments = plan.segments()
    owner = np.searchsorted(plan.seg_start, plan.edge_src, side="right") - 1
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(len(segments) + 1))
    walk = _Walk(forward, head, plan, loss_of, chunk, train, KVStack(_longest_inner(plan)))
    for number, leaving in _visits(segments):
        edges = order[bounds[number] : bounds[number + 1]]
        segment = segments[number]
        inner = segment.sub_end > segment.end
        if not leaving and inner:
            walk.enter(segment)
        elif inner:
            walk.leave(segment, edges)
        elif len(edges):
            walk.compute(segment, edges)
    return walk.results()


def _longest_inner(plan: TreePlan) -> int:
    inner = plan.seg_sub_end > plan.seg_end
    return int((plan.pos[plan.seg_end[inner] - 1] + 1).max()) if inner.any() else 0


def _visits(segments: list[Segment]) -> Iterator[tuple[int, bool]]:
    """(segment, False) on the way down and (segment, True) on the way up, depth first."""
    open_: list[int] = []
    for number, segment in enumerate(segments):
        while open_ and open_[-1] != segment.parent:
            yield open_.pop(), True
        open_.append(number)
        yield number, False
        if segment.sub_end == segment.end:
            open_.pop()
    while open_:
        yield open_.pop(), True


@dataclass(slots=True)
class _Walk:
    forward: SegmentForward
    head: Head
    plan: TreePlan
    loss_of: EdgeLossOf
    chunk: int
    train: bool
    stack: KVStack
    found: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def enter(self, segment: Segment) -> None:
        with torch.no_grad():
            self._run(segment)
        self.stack.push()

    def leave(self, segment: Segment, edges: np.ndarray) -> None:
        self.stack.pop(segment.end - segment.start)
        self.compute(segment, edges, inner=True)

    def compute(self, segment: Segment, edges: np.ndarray, *, inner: bool = False) -> None:
        """Run the segment with a graph, and send its loss (and, for an inner one, what its children sent it)
        back."""
        with torch.set_grad_enabled(self.train):
            hidden = self._run(segment)
            rows, targets = self.plan.edge_src[edges] - segment.start, self.plan.edge_tgt[edges]
            logp, entropy = logprobs_at(hidden, rows, targets, self.head, chunk=self.chunk)
            self.found.append((edges, logp.detach(), entropy))
            if not self.train:
                return
            roots = list(self.stack.roots()) if inner else []
            if len(edges):
                loss = self.loss_of(edges, logp, entropy)
                roots.append((loss, torch.ones_like(loss)))
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        self.stack.collect()

    def _run(self, segment: Segment) -> torch.Tensor:
        self.stack.start()
        own = slice(segment.start, segment.end)
        return self.forward(self.plan.ids[own], self.plan.pos[own], self.stack)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.found
        if not found:
            return torch.zeros(0), torch.zeros(0)
        place = torch.from_numpy(np.argsort(np.concatenate([edges for edges, _, _ in found])))
        columns = [torch.cat([row[i] for row in found]) for i in (1, 2)]
        return columns[0][place.to(columns[0].device)], columns[1][place.to(columns[1].device)]
