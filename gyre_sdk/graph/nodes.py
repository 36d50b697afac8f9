"""What a branch graph is made of: nodes, calls, links and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from gyre_sdk.wire.records import EdgeKind, Finish, Role, Span

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Provenance = Literal["given", "sampled"]
CallState = Literal["pending", "done", "failed"]

NO_IDS: Int32 = np.empty(0, np.int32)
NO_FLOATS: Float32 = np.empty(0, np.float32)
for _empty in (NO_IDS, NO_FLOATS):
    _empty.flags.writeable = False


class Node:
    """A maximal run of tokens of one provenance in one context; holds only the tokens it adds.

    Its id names the place where it starts, so it never changes: when a node is split its head keeps the id,
    and the tail gets the id it would have had if it had always started there. `c7` is what call 7 sampled,
    `c7+40` the same from its 40th token on; `g` and a hash is a given run.
    """

    __slots__ = (
        "call",
        "enders",
        "given",
        "id",
        "offset",
        "owner",
        "parent",
        "sampled",
        "start",
        "token_ids",
    )

    def __init__(
        self, id: str, parent: Node | None, start: int, token_ids: Int32, call: int, offset: int, owner: int
    ) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        """Position of its first token in every context that holds it."""
        self.token_ids = token_ids
        """int32[n], n >= 1"""
        self.call = call
        """The call that sampled it; -1 for given tokens."""
        self.offset = offset
        """Position of its first token in that call's output."""
        self.owner = owner
        """The smallest number among the calls whose context or reply holds it."""
        self.given: dict[int, Node] | None = None
        """Following given nodes by their first token."""
        self.sampled: list[Node] | None = None
        """Following sampled nodes, by call number."""
        self.enders: list[int] | None = None
        """Calls without output whose prompt ends here."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"<Node {self.id} [{self.start}, {self.end})>"

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.token_ids)

    @property
    def provenance(self) -> Provenance:
        """`given` (a prompt's) or `sampled` (the policy's own, in this place)."""
        return "given" if self.call < 0 else "sampled"

    def children(self) -> Iterator[Node]:
        """The nodes that continue it: given ones by first token, then sampled ones by call."""
        if self.given:
            for token in sorted(self.given):
                yield self.given[token]
        if self.sampled:
            yield from self.sampled


class Call:
    """One model request with its reply, as the records tell it. Arrays are read-only."""

    __slots__ = (
        "at",
        "base_call",
        "base_len",
        "cached_tokens",
        "delivered",
        "delivered_at",
        "delta",
        "dialect",
        "done_at",
        "engine",
        "error",
        "finish",
        "first",
        "first_token_at",
        "last",
        "logprobs",
        "marks",
        "message",
        "number",
        "output_ids",
        "prompt_tokens",
        "request",
        "rerender",
        "rerender_of",
        "sampling",
        "state",
        "versions",
    )

    def __init__(self, number: int, at: float) -> None:
        self.number = number
        self.at = at
        """When its intent was written (s since the epoch); `done_at`: when its result or failure was."""
        self.done_at: float | None = None
        self.first_token_at: float | None = None
        self.state: CallState = "pending"
        self.dialect = ""
        self.base_call = -1
        self.base_len = 0
        self.delta: Int32 = NO_IDS
        """int32[d]: prompt tokens behind the base; held only while the call is pending."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sampling: dict[str, bool | float | int | str | list[int | str]] | None = None
        self.marks: dict[str, str] | None = None
        self.rerender = ""
        self.rerender_of = -1
        self.output_ids: Int32 = NO_IDS
        """int32[m]; of a pending or failed call: the partial reply, if any is known."""
        self.logprobs: Float32 = NO_FLOATS
        """float32[m], the sampler's"""
        self.versions: tuple[Span, ...] = ()
        self.finish: Finish | None = None
        self.engine = ""
        self.error = ""
        self.delivered: bool | None = None
        """Whether the harness got the reply's last byte; None while nothing was recorded about it."""
        self.delivered_at: float | None = None
        self.first: Node | None = None
        """First node of its output (None without output, or while it isn't done)."""
        self.last: Node | None = None
        """Where its context with its reply ends (None while it isn't done, or when both are empty)."""
        self.request: bytes = b""
        """The recorded request; kept only by graphs made with `keep_bodies`. The same holds for `message`."""
        self.message: bytes = b""

    def __repr__(self) -> str:
        return f"<Call {self.number} {self.state}, {self.prompt_tokens} + {len(self.output_ids)} tokens>"

    @property
    def done(self) -> bool:
        """It has a whole reply, and its tokens are in the graph."""
        return self.state == "done"

    def version_at(self, index: npt.ArrayLike) -> Int32:
        """int32: policy version of each output position in `index`."""
        positions = np.asarray(index)
        if not self.versions:
            return np.full(positions.shape, -1, np.int32)
        starts = np.array([span.start for span in self.versions])
        values = np.array([span.version for span in self.versions], np.int32)
        return values[np.searchsorted(starts, positions, side="right") - 1]


@dataclass(frozen=True, slots=True)
class CallLink:
    """A typed edge between calls, as declared, found or implied; `to_networkx` turns it into one between
    nodes.
    """

    kind: EdgeKind
    source: int
    target: int
    reason: str = ""
    inferred: bool = False


@dataclass(frozen=True, slots=True)
class PathArrays:
    """A root-to-leaf path token by token; all arrays have its length n."""

    token_ids: Int32
    call: Int32
    """Number of the call that sampled the token, -1 for given ones."""
    index: Int32
    """Position in that call's output, -1 for given ones."""
    logprobs: Float32
    """The sampler's, NaN for given ones."""
    versions: Int32
    """Policy version it was sampled with, -1 for given ones."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The end of a branch. `nodes` leads from the root to it."""

    id: str
    """Id of its last node."""
    call: int
    """The call whose reply it ends."""
    role: Role
    orphan: bool
    """The reply was never delivered whole nor built upon: it must not be trained."""
    nodes: tuple[Node, ...] = field(repr=False)
    calls: dict[int, Call] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Length of the whole path."""
        return self.nodes[-1].end

    @property
    def num_sampled(self) -> int:
        """Sampled tokens on the path."""
        return sum(len(node) for node in self.nodes if node.call >= 0)

    def path(self) -> PathArrays:
        """The path's arrays, newly made: O(its length)."""
        n = self.num_tokens
        token_ids = np.concatenate([node.token_ids for node in self.nodes])
        call, index, versions = np.full((3, n), -1, np.int32)
        logprobs = np.full(n, np.nan, np.float32)
        for node in self.nodes:
            if node.call < 0:
                continue
            here = slice(node.start, node.end)
            positions = np.arange(node.offset, node.offset + len(node), dtype=np.int32)
            source = self.calls[node.call]
            call[here], index[here] = node.call, positions
            logprobs[here] = source.logprobs[node.offset : node.offset + len(node)]
            versions[here] = source.version_at(positions)
        return PathArrays(token_ids, call, index, logprobs, versions)

    @property
    def token_ids(self) -> Int32:
        """int32[n]: the tokens of the whole path."""
        return np.concatenate([node.token_ids for node in self.nodes])
