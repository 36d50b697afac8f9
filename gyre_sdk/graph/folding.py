"""Checking and applying one record. `check` raises without changing anything; `fold` then cannot fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gyre_sdk.errors import CorruptRecordError, GraphError
from gyre_sdk.graph.nodes import NO_IDS, Call, CallLink, Float32, Int32, Node
from gyre_sdk.graph.tree import ROOT
from gyre_sdk.wire import unpack_floats, unpack_ids
from gyre_sdk.wire.records import (
    Delivered,
    Event,
    Failed,
    Intent,
    Labelled,
    Link,
    Opened,
    Partial,
    Record,
    Result,
    Span,
)

if TYPE_CHECKING:
    from gyre_sdk.graph.state import GraphState


def base_end(graph: GraphState, base_call: int, base_len: int) -> tuple[Node | None, int]:
    """(end of the base call's path, base_len). Raises GraphError unless the call is finished and that
    long.
    """
    base = graph._calls.get(base_call)
    if base is None or not base.done:
        raise GraphError(f"call {base_call} can't be a base: it is {'unknown' if base is None else base.state}")
    if not 0 <= base_len <= graph.call_length(base_call):
        raise GraphError(f"call {base_call} has {graph.call_length(base_call)} tokens, not {base_len}")
    return base.last, base_len


def check(graph: GraphState, record: Record) -> None:
    """Raises GraphError when `record` can't follow what the graph holds."""
    if isinstance(record, Opened):
        if graph.opened is not None:
            raise GraphError(f"execution {graph.execution} was opened twice")
        return
    if graph.opened is None:
        raise GraphError(f"a {type(record).__name__} record before the execution was opened")
    if graph.sealed is not None:
        raise GraphError(f"a {type(record).__name__} record after execution {graph.execution} was sealed")
    match record:
        case Intent():
            _check_intent(graph, record)
        case Result() | Failed() | Partial():
            entry = _known(graph, record.call)
            if entry.state != "pending":
                raise GraphError(f"call {record.call} ended twice")
            start = record.start if isinstance(record, Partial) else 0
            _check_output(record.call, record.ids, record.logprobs, record.versions, start)
            if start > len(entry.output_ids):
                known = len(entry.output_ids)
                raise GraphError(f"call {record.call}: partial tokens from {start} on, only {known} known")
        case Delivered() | Labelled():
            _known(graph, record.call)
        case Link():
            _known(graph, record.source)
            _known(graph, record.target)
            if record.source >= record.target:
                raise GraphError(
                    f"{record.kind} must lead to a later call, not from {record.source} to {record.target}"
                )
            if record.kind == "continues":
                raise GraphError("continues edges follow from the tokens; they can't be declared")
        case _:
            pass


def _known(graph: GraphState, call: int) -> Call:
    entry = graph._calls.get(call)
    if entry is None:
        raise GraphError(f"call {call} is unknown")
    return entry


def _check_intent(graph: GraphState, record: Intent) -> None:
    if record.call in graph._calls:
        raise GraphError(f"call {record.call} began twice")
    if record.call < 0:
        raise GraphError("calls are numbered from 0")
    if record.base_call >= 0:
        if record.base_call >= record.call:
            raise GraphError(f"call {record.call} can't build on call {record.base_call}: bases come earlier")
        base_end(graph, record.base_call, record.base_len)
    elif record.base_len:
        raise GraphError(f"call {record.call} has a base of {record.base_len} tokens, but no base call")
    if record.rerender_of >= record.call:
        raise GraphError(f"call {record.call} can't re-render call {record.rerender_of}")
    _ids(record.call, record.delta)


def _check_output(call: int, ids: bytes, logprobs: bytes, versions: tuple[Span, ...], start: int) -> None:
    n = len(_ids(call, ids))
    if len(logprobs) != len(ids):
        raise GraphError(f"call {call}: {n} tokens, but {len(logprobs) / 4:g} logprobs")
    at = start
    for span in versions:
        if span.start != at or span.end <= span.start:
            raise GraphError(f"call {call}: version spans must cover the output without gaps, {versions} do not")
        at = span.end
    if at != start + n:
        raise GraphError(f"call {call}: version spans cover {at - start} of {n} tokens")


def _ids(call: int, data: bytes) -> Int32:
    try:
        return unpack_ids(data)
    except CorruptRecordError as error:
        raise GraphError(f"call {call}: {error}") from error


def fold(graph: GraphState, record: Record) -> None:
    """Apply a record that was checked."""
    match record:
        case Opened():
            graph.opened = record
        case Intent():
            graph._calls[record.call] = _pending(record, graph)
        case Partial():
            _keep_partial(graph._calls[record.call], record)
        case Result():
            _commit(graph, graph._calls[record.call], record)
        case Failed():
            _fail(graph._calls[record.call], record)
        case Delivered():
            entry = graph._calls[record.call]
            if entry.delivered is not True:
                entry.delivered, entry.delivered_at = record.complete, record.at
        case Link():
            link = CallLink(record.kind, record.source, record.target, record.reason, record.inferred)
            graph._links.setdefault(record.target, set()).add(link)
        case Labelled():
            known = graph._labels.get(record.call)
            mine = (record.at, record.role, record.reason)
            if known is None or mine >= known:
                graph._labels[record.call] = mine
        case Event():
            graph.events.append(record)
        case _:
            graph.sealed = record


def _pending(record: Intent, graph: GraphState) -> Call:
    call = Call(record.call, record.at)
    call.dialect = record.dialect
    call.base_call, call.base_len = record.base_call, record.base_len
    call.delta = _frozen(unpack_ids(record.delta))
    call.prompt_tokens = record.base_len + len(call.delta)
    call.sampling = record.sampling or None
    call.marks = record.marks or None
    call.rerender, call.rerender_of = record.rerender, record.rerender_of
    if graph.keep_bodies:
        call.request = record.request
    return call


def _keep_partial(call: Call, record: Partial) -> None:
    call.output_ids = _frozen(np.concatenate([call.output_ids[: record.start], unpack_ids(record.ids)]))
    call.logprobs = _frozen_floats(np.concatenate([call.logprobs[: record.start], unpack_floats(record.logprobs)]))
    kept = [Span(s.version, s.start, min(s.end, record.start)) for s in call.versions if s.start < record.start]
    call.versions = tuple(kept) + record.versions


def _commit(graph: GraphState, call: Call, record: Result) -> None:
    """Put a finished call's tokens into the tree: the one place where it grows."""
    call.output_ids = _frozen(unpack_ids(record.ids))
    call.logprobs = _frozen_floats(unpack_floats(record.logprobs))
    call.versions = record.versions
    call.finish, call.engine = record.finish, record.engine
    call.done_at, call.first_token_at = record.at, record.first_token_at
    call.cached_tokens = record.cached_tokens
    if graph.keep_bodies:
        call.message = record.message
    tree = graph._tree
    place = ROOT
    if call.base_call >= 0:
        place = tree.place(graph._calls[call.base_call].last, call.base_len)
    end = tree.add_given(place, call.delta, call.number)
    call.delta = NO_IDS
    if len(call.output_ids):
        call.first = call.last = tree.add_sampled(end, call)
    else:
        call.last = end
        if end is not None:
            end.enders = sorted([*(end.enders or ()), call.number])
    tree.own(call.last, call.number)
    call.state = "done"


def _fail(call: Call, record: Failed) -> None:
    call.state, call.error, call.done_at = "failed", record.error, record.at
    call.delta = NO_IDS
    if record.ids:
        call.output_ids = _frozen(unpack_ids(record.ids))
        call.logprobs = _frozen_floats(unpack_floats(record.logprobs))
        call.versions = record.versions


def _frozen(array: Int32) -> Int32:
    """Our own read-only copy: a view would keep the whole record alive."""
    if not len(array):
        return NO_IDS
    copy = np.array(array, np.int32)
    copy.flags.writeable = False
    return copy


def _frozen_floats(array: Float32) -> Float32:
    copy = np.array(array, np.float32)
    copy.flags.writeable = False
    return copy
