"""Calls that outlive the process that began them: their tokens on disk while they run, and how they go on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from gyre_sdk.capture.contexts import KnownCall
from gyre_sdk.capture.live import LiveCall
from gyre_sdk.capture.model import ChatRenderer, Ids
from gyre_sdk.graph.nodes import Call
from gyre_sdk.sampling import Sampling
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Intent, Partial, Span

ATTEMPTS_PER_LIFE = 100
"""Attempts of a gateway's n-th life on a run are numbered from n times this on: an engine may still be busy with an older one."""


def due(call: LiveCall, every_s: float | None) -> bool:
    """Whether a running call has had new tokens long enough that they should be on disk."""
    return every_s is not None and call.sampled.size > call.kept and time.monotonic() - call.kept_at >= every_s


def partial_of(call: LiveCall, at: float) -> Partial | None:
    """The tokens that no earlier record of the call holds; they count as kept from now on."""
    start, sampled = call.kept, call.sampled
    call.kept, call.kept_at = sampled.size, time.monotonic()
    if sampled.size == start:
        return None
    spans = sampled.spans(call.version_hint)
    return Partial(
        call=call.number,
        at=at,
        start=start,
        ids=pack_ids(sampled.all_ids()[start:]),
        logprobs=pack_floats(sampled.all_logprobs()[start:]),
        versions=tuple(Span(s.version, max(s.start, start), s.end) for s in spans if s.end > start),
    )


def revived(intent: Intent, call: Call, prompt: Ids, known: KnownCall, rid: str, renderer: ChatRenderer) -> LiveCall:
    """A call that an earlier process began and did not finish, with the tokens that it had put on disk.

    intent, call: as the log and the graph hold them. Nothing runs until a retry asks for it.
    """
    live = LiveCall(intent.call, rid, prompt, known.seen_tools, renderer)
    live.created, live.marks, live.prompt_key = intent.at, dict(intent.marks), known.prompt.key
    live.sampling = msgspec.convert(intent.sampling, Sampling)
    live.sampled.add(np.asarray(call.output_ids), np.asarray(call.logprobs))
    live.sampled.versions = list(call.versions)
    live.kept = live.sampled.size
    return live


def lives(events: Sequence[str]) -> int:
    """How many gateways have worked on a log before, by the names of its events."""
    return 1 + sum(name == "recovered" for name in events)
