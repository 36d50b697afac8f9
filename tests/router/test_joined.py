"""Replies joined from pieces, against the reply that was cut up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.router.reply import Event, Joined, Meta, SpanIn
from gyre_sdk.errors import EngineError


@given(data=st.data())
def test_any_cutting_joins_to_the_whole(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    tokens = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    versions = sorted(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    cuts = sorted(data.draw(st.sets(st.integers(0, count), max_size=4)) | {0, count})
    joined = Joined(5, wants_logprobs=True)
    for start, end in zip(cuts, [*cuts[1:], count]):
        joined.begin()
        cumulative = data.draw(st.booleans())
        stops = sorted(data.draw(st.sets(st.integers(start, end), max_size=4)) | {end})
        at = start
        for stop in stops:
            first = start if cumulative else at
            spans = [SpanIn(str(v), i - start, i - start + 1) for i, v in enumerate(versions) if start <= i < stop]
            entries = [(-token / 10, token, None) for token in tokens[first:stop]]
            meta = Meta(completion_tokens=stop - start, weight_versions=spans, output_token_logprobs=entries)
            assert joined.take(Event(tokens[first:stop], meta), "e") == stop - at
            at = stop
    assert joined.ids == tokens
    assert [entry[1] for entry in joined.logprobs] == tokens
    flat = [int(span.version) for span in joined.spans for _ in range(span.start, span.end)]
    assert flat == versions
    assert all(a.end == b.start and a.version != b.version for a, b in zip(joined.spans, joined.spans[1:]))


@pytest.mark.parametrize(
    "meta",
    [
        Meta(completion_tokens=3, output_token_logprobs=[(-0.1, 1, None), (-0.1, 2, None)]),
        Meta(completion_tokens=2, output_token_logprobs=[(-0.1, 1, None)]),
        Meta(completion_tokens=2, output_token_logprobs=[(-0.1, 1, None), (-0.1, 3, None)]),
        Meta(completion_tokens=2),
    ],
)
def test_what_does_not_add_up_is_refused(meta: Meta) -> None:
    joined = Joined(5, wants_logprobs=True)
    joined.begin()
    with pytest.raises(EngineError):
        joined.take(Event([1, 2], meta), "e")
