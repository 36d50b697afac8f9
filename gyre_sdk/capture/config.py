"""Settings of the gateway, and what an execution is opened with."""

from __future__ import annotations

import msgspec

from gyre_sdk.capture.canonical import MatcherPolicy


class PinnedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling that the server decides, whatever the harness asks for; None leaves it to the harness."""

    temperature: float | None = 1.0
    """Softmax temperature; training wants 1.0."""
    top_p: float | None = 1.0
    top_k: int | None = -1
    """-1 = off."""
    max_new_tokens: int | None = None
    """Upper bound on one reply, in tokens; a harness may ask for less."""
    seed: int | None = None
    """Base seed; call n of an execution samples with a seed made from it, the execution and n."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Soft caps of one execution: a call that finds one reached is refused, running calls finish. None = no cap."""

    turns: int | None = None
    """Finished calls."""
    tokens: int | None = None
    """Unique tokens in the graph, given and sampled."""
    nodes: int | None = None
    """Nodes of the graph."""
    bytes: int | None = None
    """Bytes of the WAL."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway behaves. All times in seconds."""

    model: str = "policy"
    """Name that /v1/models lists. Any model name is served."""
    matcher: MatcherPolicy = "default"
    sampling: PinnedSampling = PinnedSampling()
    limits: Limits = Limits()
    keepalive_s: float = 10.0
    """Longest silence on a stream while the engine works."""
    max_body_bytes: int = 64 * 2**20
    """Larger request bodies are refused with 413."""
    requests_per_s: float = 200.0
    """Requests of one execution (and all those without a valid key together) in the long run; more get 429."""
    request_burst: int = 1000
    """Requests beyond that which are let through at once."""
    max_live_calls: int = 64
    """Calls of one execution at the same time; more are refused with 429."""
    replay: bool = True
    """Answer a repeated request with the earlier reply when that one was not delivered whole."""
    orphan_grace_s: float = 30.0
    """How long a call goes on after its client vanished, so that a retry finds its reply; 0 aborts it at once."""
    partial_every_s: float | None = 5.0
    """A reply in the making is put on record so often, so that a crash costs no more than this; None never."""
    resume_attempts: int = 8
    """How often a call whose engine failed in mid-reply is continued from its partial tokens; 8 take about 14 s."""
    retry_after_s: float = 1.0
    """`retry-after` of a 429 or 503 when the engine names none."""
    metrics_token: str = ""
    """Bearer token of `GET /metrics` (Prometheus); empty: there is no such page."""
    cache_salt: str | None = None
    """Passed to the engine with every call."""


class ExecutionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution is opened with. `execution`: 12 lower-case hex digits; a random one when empty."""

    execution: str = ""
    group: str = ""
    task: str = ""
    harness: str = ""
    deadline_s: float | None = None
    meta: dict[str, str] = {}
    limits: Limits | None = None
    """Instead of the gateway's."""
