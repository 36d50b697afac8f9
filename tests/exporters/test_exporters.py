"""Exports hold what the graph holds, in words that other programs accept."""

from __future__ import annotations

import json
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import ConfigError, CorruptRecordError
from gyre_sdk.exporters import (
    FORMATS,
    SampleOptions,
    equal_graphs,
    export,
    from_graphml,
    from_node_link,
    samples,
    to_cytoscape,
    to_dot,
    to_graphml,
    to_node_link,
)
from gyre_sdk.exporters.atif import to_atif, to_json
from gyre_sdk.exporters.conversation import Conversations, as_messages
from gyre_sdk.exporters.registry import safe_name
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Intent, Link, Opened, Result, Span
from tests.exporters.examples import example
from tests.graph.programs import Harness, Step, programs


@given(programs)
def test_graphml_and_node_link_load_back_to_an_equal_graph(program: list[Step]) -> None:
    graph = Harness().run(program).graph
    whole = graph.to_networkx()
    assert equal_graphs(from_graphml(to_graphml(graph)), whole)
    assert equal_graphs(from_node_link(to_node_link(graph)), whole)


def test_the_example_loads_back_too_and_a_difference_is_seen() -> None:
    graph = example()
    whole = graph.to_networkx()
    assert equal_graphs(from_graphml(to_graphml(graph)), whole)
    assert equal_graphs(from_node_link(to_node_link(graph)), whole)
    kinds = {kind for *_, kind in whole.edges(data="kind")}
    assert kinds == {"continues", "retries", "forks", "returns", "compacts", "rerenders"}
    other = graph.to_networkx()
    node = next(n for n, f in other.nodes(data=True) if "logprobs" in f)
    other.nodes[node]["logprobs"] = np.nextafter(other.nodes[node]["logprobs"], np.float32(0))
    assert not equal_graphs(other, whole)


odd_texts = st.text(max_size=12) | st.sampled_from(
    ["\r\n", "\x00", "\ufffe\uffff", " x ", "\\\\u0041", "\ud800", "\x1b[31m", "", "&<>]]>"]
)


@given(odd_texts, odd_texts)
def test_any_text_loads_back(task: str, reason: str) -> None:
    """Also what XML has no character for: texts come from harnesses."""
    graph = BranchGraph.replay(
        [Opened(execution="e", at=0.0, task=task, harness=reason)]
        + [
            record
            for call in range(2)
            for record in (
                Intent(call=call, at=0.0, dialect="chat", delta=pack_ids([1, 2 + call])),
                Result(
                    call=call,
                    at=1.0,
                    ids=pack_ids([5]),
                    logprobs=pack_floats([-1.0]),
                    versions=(Span(0, 0, 1),),
                    finish="stop",
                ),
            )
        ]
        + [Link(kind="forks", source=0, target=1, at=1.0, reason=reason)]
    )
    whole = graph.to_networkx()
    assert any(facts.get("reason") == reason for *_, facts in whole.edges(data=True))
    assert equal_graphs(from_graphml(to_graphml(graph)), whole)
    assert equal_graphs(from_node_link(to_node_link(graph)), whole)


def test_odd_logprobs_survive() -> None:
    values = np.array([-np.inf, -0.1, -1e-45, -3.4028235e38, -7.1234567], np.float32)
    graph = BranchGraph.replay(
        [
            Opened(execution="e", at=0.0),
            Intent(call=0, at=0.0, dialect="chat", delta=pack_ids([1])),
            Result(
                call=0,
                at=0.0,
                ids=pack_ids([1, 2, 3, 4, 5]),
                logprobs=pack_floats(values),
                versions=(Span(0, 0, 5),),
                finish="stop",
            ),
        ]
    )
    for back in (from_graphml(to_graphml(graph)), from_node_link(to_node_link(graph))):
        assert equal_graphs(back, graph.to_networkx())


@pytest.mark.parametrize("text", ["", "<graphml", "{}", "[]", "null"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(CorruptRecordError):
        from_graphml(text)
    with pytest.raises(CorruptRecordError):
        from_node_link(text)


def test_cytoscape_and_dot() -> None:
    graph = example()
    data = json.loads(to_cytoscape(graph, tokens=False))
    assert len(data["elements"]["nodes"]) == len(graph.nodes)
    assert "token_ids" not in data["elements"]["nodes"][0]["data"]
    dot = to_dot(graph)
    pydot = pytest.importorskip("pydot")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (parsed,) = pydot.graph_from_dot_data(dot)
    assert len(parsed.get_nodes()) == len(graph.nodes) + 1  # pydot counts the defaults as a node
    assert len(parsed.get_edges()) == graph.to_networkx().number_of_edges()
    ElementTree.fromstring(to_graphml(graph))


def test_conversations_are_put_together_again() -> None:
    talk = Conversations(example())
    messages = as_messages(talk.whole(3))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["reasoning_content"] == "Let me think"
    assert messages[2]["tool_calls"] == [
        {
            "id": "t1",
            "type": "function",
            "function": {"name": "task", "arguments": '{"prompt": "What is hello in Latin?"}'},
        }
    ]
    assert messages[3] == {"role": "tool", "tool_call_id": "t1", "content": "salve"}
    # A compacted and a re-rendered context hold parts that were stored before.
    assert as_messages(talk.prompt(5))[0]["content"] == messages[0]["content"]
    assert [m["role"] for m in as_messages(talk.whole(6))] == ["system", "user", "assistant", "tool", "assistant"]
    assert talk.tools(3)[0].name == "task"


def test_atif_is_accepted_by_its_own_models() -> None:
    atif = pytest.importorskip("atif")
    graph = example()
    documents = to_atif(graph)
    for document in documents:
        read = atif.Trajectory.model_validate_json(to_json(document))
        assert read.schema_version == "ATIF-v1.8"
    main = documents[0]
    assert main.subagent_trajectories is not None
    helper = next(d for d in main.subagent_trajectories if d.trajectory_id == "call-1")
    asked = next(step for step in main.steps if step.tool_calls)
    assert asked.observation is not None
    references = [ref for result in asked.observation.results for ref in result.subagent_trajectory_ref or []]
    assert [ref.trajectory_id for ref in references] == [helper.trajectory_id]
    assert documents[0].continued_trajectory_ref is not None
    # Every call's tokens are in exactly one step that is no copy.
    counts: dict[int, int] = {}
    todo = list(documents)
    while todo:
        document = todo.pop()
        todo.extend(document.subagent_trajectories or [])
        for step in document.steps:
            if step.metrics is not None and not step.is_copied_context:
                call = step.extra["gyre"]["call"] if step.extra else -1
                counts[call] = counts.get(call, 0) + 1
                assert step.metrics.completion_token_ids == graph.calls[call].output_ids.tolist()
    assert counts == dict.fromkeys(range(7), 1)


@given(programs)
def test_any_graph_becomes_valid_atif(program: list[Step]) -> None:
    atif = pytest.importorskip("atif")
    for document in to_atif(Harness().run(program).graph):
        atif.Trajectory.model_validate_json(to_json(document))


@given(programs)
def test_samples_train_every_token_once(program: list[Step]) -> None:
    harness = Harness().run(program)
    graph = harness.graph
    options = SampleOptions(roles=("main", "subagent", "main-summary", "subagent-summary", "auxiliary"), orphans=True)
    seen: list[tuple[int, int]] = []
    leaves = {leaf.id: leaf for leaf in graph.leaves()}
    for sample in samples([graph], options):
        path = leaves[sample["branch"]].path()
        assert sample["token_ids"] == path.token_ids.tolist()
        for i in np.flatnonzero(sample["loss_mask"]):
            seen.append((int(path.call[i]), int(path.index[i])))
            assert sample["logprobs"][i] is not None
    assert len(seen) == len(set(seen)) == sum(len(c.output_ids) for c in graph.calls.values() if c.done)


def test_samples_leave_out_what_must_not_be_trained() -> None:
    graph = example()
    made = list(samples([graph]))
    orphan = [node.id for leaf in graph.leaves() if leaf.orphan for node in leaf.nodes if node.call == 2]
    assert orphan
    assert all(sample["branch"] not in orphan for sample in made)
    assert not list(samples([graph], SampleOptions(min_reward=0.9)))
    unsealed = BranchGraph()
    assert not list(samples([unsealed]))
    assert made[0]["messages"][0]["role"] == "system"


def test_parquet_reads_back(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    graph = example()
    paths = export("parquet", iter([graph, Harness().graph]), tmp_path)
    tables = {path.stem: pq.read_table(path).to_pylist() for path in paths}
    assert len(tables["calls"]) == 8
    assert len(tables["nodes"]) == len(graph.nodes)
    assert {row["leaf"] for row in tables["branches"]} == {leaf.id for leaf in graph.leaves()}
    row = next(row for row in tables["branches"] if row["call"] == 4)
    assert row["token_ids"] == graph.path_tokens(4).tolist()
    links = next(row for row in tables["calls"] if row["call"] == 3)["links"]
    assert links[0]["kind"] == "retries"


def test_spans_link_what_the_graph_links(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    (path,) = export("otel", [example()], tmp_path)
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    chats = [span for span in spans if span["name"] == "chat"]
    assert len(chats) == 8
    by_call = {span["attributes"]["gyre.call"]: span for span in chats}
    assert by_call[3]["links"][0]["attributes"]["gyre.edge"] == "retries"
    assert by_call[3]["links"][0]["context"]["span_id"] == by_call[2]["context"]["span_id"]
    agents = [span for span in spans if span["name"] == "invoke_agent subagent"]
    assert by_call[1]["parent_id"] == agents[0]["context"]["span_id"]
    assert by_call[7]["status"]["status_code"] == "ERROR"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_writes_files(name: str, tmp_path: Path) -> None:
    graphs = (BranchGraph.replay([]) if empty else example() for empty in (False, True))
    paths = export(name, graphs, tmp_path / "out")
    assert paths
    assert all(path.is_file() and path.parent == tmp_path / "out" for path in paths)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format"):
        export("pdf", [], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't export"):
        export("dot", [example()], tmp_path / "file")
    assert safe_name("../../etc/passwd") == "_.._etc_passwd"
    assert safe_name("..") == "unnamed"


def test_networkx_algorithms_work_on_it() -> None:
    whole = example().to_networkx()
    assert nx.is_directed_acyclic_graph(whole)
    assert list(nx.topological_generations(whole))
