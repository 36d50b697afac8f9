"""Random programs of turns, retries, forks, edits and compactions: what must hold of every branch graph."""

from __future__ import annotations

from random import Random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import GraphError
from gyre_sdk.graph import ROLES, BranchGraph
from gyre_sdk.graph.checks import check_invariants
from gyre_sdk.wire import decode, encode
from gyre_sdk.wire.records import Delivered, Intent, Link, Opened, Record, Result, Sealed, Span
from tests.graph.programs import Harness, Step, programs


@given(programs)
def test_every_context_is_what_the_engine_saw(program: list[Step]) -> None:
    harness = Harness().run(program)
    graph, truth = harness.graph, harness.truth
    for call in truth.prompts:
        if call in truth.failed:
            assert graph.calls[call].state == "failed"
            with pytest.raises(GraphError):
                graph.path_tokens(call)
            continue
        assert graph.path_tokens(call).tolist() == truth.whole(call)
        assert graph.prompt_ids(call).tolist() == truth.prompts[call]


@given(programs)
def test_sampled_tokens_stand_where_they_were_sampled(program: list[Step]) -> None:
    harness = Harness().run(program)
    graph, truth = harness.graph, harness.truth
    on_branches = set()
    for leaf in graph.leaves():
        path = leaf.path()
        assert leaf.role in ROLES
        assert leaf.num_sampled == int((path.call >= 0).sum())
        assert np.array_equal(path.token_ids, graph.path_tokens(leaf.call))
        for i in range(len(path)):
            call, index = int(path.call[i]), int(path.index[i])
            if call < 0:
                assert index == -1
                assert path.versions[i] == -1
                assert np.isnan(path.logprobs[i])
                continue
            on_branches.add((call, index))
            # The position, the exact prefix, the logprob and the version at which it was sampled.
            assert path.token_ids[: i + 1].tolist() == truth.prompts[call] + truth.outputs[call][: index + 1]
            assert path.logprobs[i] == truth.logprob(call, index)
            assert path.versions[i] == truth.version(call, index)
    done = [call for call in truth.prompts if call not in truth.failed]
    assert on_branches == {(call, i) for call in done for i in range(len(truth.outputs[call]))}


@given(programs)
def test_forest_and_acyclic(program: list[Step]) -> None:
    graph = Harness().run(program).graph
    check_invariants(graph)
    whole = graph.to_networkx()
    tree = nx.DiGraph()
    tree.add_nodes_from(whole)
    tree.add_edges_from((a, b) for a, b, kind in whole.edges(data="kind") if kind == "continues")
    assert len(tree) == 0 or nx.is_branching(tree)
    assert nx.is_directed_acyclic_graph(whole)


@given(programs)
def test_every_link_is_an_edge_to_the_first_new_token(program: list[Step]) -> None:
    harness = Harness().run(program)
    graph, truth = harness.graph, harness.truth
    edges = graph.to_networkx().edges
    for link in graph.links():
        if link.source in truth.failed or link.target in truth.failed:
            continue
        path = graph.path_nodes(link.target)
        own = [node for node in path if node.owner == link.target]
        if not own:
            assert not truth.outputs[link.target]
            continue
        call = graph.calls[link.target]
        assert call.base_len <= own[0].start <= len(truth.prompts[link.target])
        source = graph.calls[link.source].last
        if link.kind == "rerenders":
            shared = {node.id for node in path}
            source = next((n for n in graph.path_nodes(link.source) if n.id not in shared), source)
        assert source is not None
        facts = edges[source.id, own[0].id]
        kinds = {facts["kind"], *(also["kind"] for also in facts.get("also", ()))}
        assert link.kind in kinds


@given(programs)
def test_replay_is_equal(program: list[Step]) -> None:
    harness = Harness().run(program)
    frames = [encode(record, seq) for seq, record in enumerate(harness.truth.records)]
    again = BranchGraph.replay(decode(frame)[1] for frame in frames)
    assert again.digest() == harness.graph.digest()
    assert list(again.nodes) == list(harness.graph.nodes)


def _needs(records: list[Record]) -> list[set[int]]:
    """For each record the earlier ones it must follow: the first, its call's own, and the results that its
    intent builds on.
    """
    needs: list[set[int]] = []
    results: dict[int, int] = {}
    by_call: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        need = {0} if i else set()
        calls = [c for name in ("call", "source", "target") if (c := getattr(record, name, None)) is not None]
        for call in calls:
            need.update(by_call.get(call, []))
            if hasattr(record, "call"):
                by_call.setdefault(call, []).append(i)
        if isinstance(record, Intent) and record.base_call >= 0:
            need.add(results[record.base_call])
        if isinstance(record, Result):
            results[record.call] = i
        if isinstance(record, Sealed):
            need.update(range(i))
        needs.append(need)
    return needs


@given(programs, st.integers(0, 2**32))
def test_any_order_that_respects_time_gives_the_same_graph(program: list[Step], seed: int) -> None:
    harness = Harness().run(program)
    records = harness.truth.records
    needs = _needs(records)
    random = Random(seed)
    done: set[int] = set()
    order: list[int] = []
    while len(order) < len(records):
        ready = [i for i in range(len(records)) if i not in done and needs[i] <= done]
        chosen = random.choice(ready)
        order.append(chosen)
        done.add(chosen)
    shuffled = BranchGraph.replay(records[i] for i in order)
    assert shuffled.digest() == harness.graph.digest()


@given(programs)
def test_roles_asked_for_on_the_way_are_those_of_the_end(program: list[Step]) -> None:
    records = Harness().run(program).truth.records
    watched = BranchGraph()
    for record in records:
        watched.apply(record)
        for call in watched.calls:
            watched.role_of_call(call)
    fresh = BranchGraph.replay(records)
    assert [watched.role_of_call(c) for c in watched.calls] == [fresh.role_of_call(c) for c in fresh.calls]


@given(programs)
def test_ids_are_stable_while_the_graph_grows(program: list[Step]) -> None:
    harness = Harness().run(program)
    graph = BranchGraph()
    starts: dict[str, tuple[int, int, int]] = {}
    for record in harness.truth.records:
        graph.apply(record)
        for identity, node in graph.nodes.items():
            place = (node.start, node.call, int(node.token_ids[0]))
            assert starts.setdefault(identity, place) == place
        assert starts.keys() == graph.nodes.keys()


@given(programs, st.lists(st.integers(0, 2), max_size=8), st.integers(0, 50))
def test_resolve_is_the_longest_path_and_changes_nothing(program: list[Step], tail: list[int], pick: int) -> None:
    harness = Harness().run(program)
    graph, truth = harness.graph, harness.truth
    done = [call for call in truth.prompts if call not in truth.failed]
    before = graph.digest()
    base = truth.whole(done[pick % len(done)]) if done else []
    query = base[: pick % (len(base) + 1)] + tail
    found = graph.resolve(np.array(query, np.int32))
    longest = 0
    for call in done:
        whole = truth.whole(call)
        same = 0
        while same < min(len(whole), len(query)) and whole[same] == query[same]:
            same += 1
        longest = max(longest, same)
    assert found.base_len == longest
    assert found.whole == (longest == len(query))
    if longest:
        assert graph.path_tokens(found.base_call)[:longest].tolist() == query[:longest]
        # With a base, only what follows is looked at, and the answer is no shorter than what was known.
        known = graph.resolve(np.array(query[longest:], np.int32), base_call=found.base_call, base_len=found.base_len)
        assert known.base_len == longest
    assert graph.digest() == before


@given(programs)
def test_a_bad_record_changes_nothing(program: list[Step]) -> None:
    harness = Harness()
    for step in program:
        harness.step(step)
    graph = harness.graph
    graph.apply(Intent(call=500, at=1.0, dialect="chat", delta=b"\0\0\0\0"))
    before = graph.digest()
    one = b"\0\0\0\0"
    bad: list[Record] = [
        Opened(execution="x", at=0.0),
        Intent(call=0, at=1.0, dialect="chat"),
        Intent(call=999, at=1.0, dialect="chat", base_call=998, base_len=1),
        Intent(call=999, at=1.0, dialect="chat", base_len=1),
        Intent(call=999, at=1.0, dialect="chat", delta=b"abc"),
        Result(call=999, at=1.0, ids=b"", logprobs=b"", versions=(), finish="stop"),
        Result(call=500, at=1.0, ids=one, logprobs=b"", versions=(Span(0, 0, 1),), finish="stop"),
        Result(call=500, at=1.0, ids=one, logprobs=one, versions=(), finish="stop"),
        Result(call=500, at=1.0, ids=one, logprobs=one, versions=(Span(0, 0, 2),), finish="stop"),
        Result(call=500, at=1.0, ids=b"abc", logprobs=b"abc", versions=(), finish="stop"),
        Link(kind="forks", source=500, target=0, at=1.0),
        Link(kind="forks", source=0, target=777, at=1.0),
        Delivered(call=777, at=1.0, complete=True),
    ]
    for record in bad:
        with pytest.raises(GraphError):
            graph.apply(record)
        assert graph.digest() == before
