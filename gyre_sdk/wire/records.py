"""What is recorded of an execution. A WAL is a sequence of these records; everything else is a fold over
them.

Arrays travel as raw little-endian bytes: `ids` and `delta` int32, `logprobs` float32; `pack_ids`,
`pack_floats`, `unpack_ids` and `unpack_floats` of `gyre_sdk.wire` convert them. Calls are numbered 0, 1, 2
... in the order of their intents. Times are seconds since the epoch (float). A prompt is stored as what it
*adds*: the first `base_len` tokens of (prompt + output) of call `base_call`, then `delta`. A record type is
never changed, only new ones (or new optional fields at the end) are added; see `VERSION`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1

Status = Literal["completed", "timeout", "harness_error", "environment_error", "cancelled"]
Culprit = Literal["agent", "environment", "verifier"]
Finish = Literal["stop", "length", "abort", "error"]
Role = Literal["main", "main-summary", "subagent", "subagent-summary", "auxiliary"]
EdgeKind = Literal["continues", "retries", "forks", "returns", "compacts", "rerenders"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens `[start, end)` were sampled with policy version `version`."""

    version: int
    start: int
    end: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an execution ended. The outcome is not the reward: an invalid execution has no reward, a verified 0
    is valid.
    """

    status: Status
    reward: float | None = None
    valid: bool = False
    failure: Culprit | None = None
    message: str = ""
    metrics: dict[str, float] = {}
    placeholder: bool = False
    """Nothing to grade: counts with reward 0 in the baseline and adds no tokens."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="opened"):
    """First record of every WAL."""

    execution: str
    at: float
    group: str = ""
    task: str = ""
    harness: str = ""
    model: str = ""
    deadline_s: float | None = None
    meta: dict[str, str] = {}


class Intent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="intent"):
    """A call is about to be sent to the engine. Written, and on disk, before the engine sees it."""

    call: int
    at: float
    dialect: str
    base_call: int = -1
    base_len: int = 0
    delta: bytes = b""
    sampling: dict[str, bool | float | int | str | list[int | str]] = {}
    marks: dict[str, str] = {}
    """What the wire said about the call's place: harness headers (agent id, thread id), retry count, system
    digest, declared role ... The keys that lineage understands are listed in `gyre_sdk.graph.edges`.
    """
    rerender: str = ""
    """Why the prompt did not extend the context the messages came from; empty when it did (or when there was
    none).
    """
    rerender_of: int = -1
    """The call whose context was re-rendered."""
    request: bytes = b""
    """The request's body, redacted and stored once: what was new in it (JSON)."""


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="result"):
    """The engine's whole reply. Written before the harness sees the reply's last byte."""

    call: int
    at: float
    ids: bytes
    logprobs: bytes
    versions: tuple[Span, ...]
    finish: Finish
    first_token_at: float | None = None
    cached_tokens: int = 0
    engine: str = ""
    message: bytes = b""
    """The reply as the dialect's client got it (JSON): text, reasoning, tool calls with their raw text and
    ids.
    """


class Partial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="partial"):
    """Tokens of a call in flight, from position `start` of its output on: a checkpoint, so that a long reply
    survives a crash.
    """

    call: int
    at: float
    start: int
    ids: bytes
    logprobs: bytes
    versions: tuple[Span, ...]
    """Positions count from the output's beginning, not from `start`."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """The call ended without a usable reply; partial tokens, if any, are kept and never trained."""

    call: int
    at: float
    error: str
    ids: bytes = b""
    logprobs: bytes = b""
    versions: tuple[Span, ...] = ()


class Delivered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delivered"):
    """Whether the reply's last byte was handed to the harness's connection."""

    call: int
    at: float
    complete: bool


class Link(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="link"):
    """A typed edge found or declared: from the end of call `source`'s reply to the first new token of call
    `target`.
    """

    kind: EdgeKind
    source: int
    target: int
    at: float
    reason: str = ""
    inferred: bool = False


class Labelled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="labelled"):
    """The role of a call's lineage, when it is known (later ones override)."""

    call: int
    at: float
    role: Role
    reason: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="event"):
    """Anything for the timeline that changes no token: tool waits, moves between cells, warnings,
    counters.
    """

    name: str
    at: float
    data: dict[str, str | float | int | bool] = {}


class Sealed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sealed"):
    """Last record of every WAL."""

    at: float
    outcome: Outcome


Record = Opened | Intent | Partial | Result | Failed | Delivered | Link | Labelled | Event | Sealed
