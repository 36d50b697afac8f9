"""ATIF there and back: ours token for token, other producers' by their tokens; and runs into runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from gyre_sdk.cli.app import make_app
from gyre_sdk.errors import ConfigError, CorruptRecordError
from gyre_sdk.exporters import from_atif
from gyre_sdk.exporters.atif import to_atif, to_json
from gyre_sdk.exporters.conversation import Conversations, as_messages
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.checks import check_invariants
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.harness.records import wal_paths
from gyre_sdk.wire import encode, file_header
from tests.exporters.examples import example, records
from tests.graph.programs import Harness, Step, programs


def back(graph: BranchGraph) -> BranchGraph:
    (imported,) = from_atif(to_json(document) for document in to_atif(graph))
    return BranchGraph.replay(imported.records, keep_bodies=True)


def assert_same_branches(one: BranchGraph, other: BranchGraph) -> None:
    ours, theirs = one.leaves(), other.leaves()
    assert [(leaf.id, leaf.call, leaf.role, leaf.orphan) for leaf in ours] == [
        (leaf.id, leaf.call, leaf.role, leaf.orphan) for leaf in theirs
    ]
    for left, right in zip(ours, theirs):
        a, b = left.path(), right.path()
        for name in ("token_ids", "call", "index", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_the_example_comes_back_with_links_texts_and_outcome() -> None:
    graph = example()
    again = back(graph)
    check_invariants(again)
    assert_same_branches(graph, again)
    assert set(again.links()) == set(graph.links())
    assert again.outcome == graph.outcome
    assert again.opened is not None
    assert (again.opened.task, again.opened.group, again.opened.harness) == ("hello", "g", "looper")
    assert [call.at for call in again.calls.values()] == [graph.calls[number].at for number in again.calls]
    talk = Conversations(again)
    messages = as_messages(talk.whole(3))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["reasoning_content"] == "Let me think"
    assert messages[-1]["content"] == "Done: salve."


@given(programs)
def test_any_graph_comes_back_token_for_token(program: list[Step]) -> None:
    graph = Harness().run(program).graph
    if not any(call.done for call in graph.calls.values()):
        return
    again = back(graph)
    check_invariants(again)
    assert_same_branches(graph, again)


def foreign(steps: list[dict[str, Any]], **root: Any) -> str:
    numbered = [{"step_id": number + 1, **step} for number, step in enumerate(steps)]
    agent = {"name": "terminus-2", "version": "1", "model_name": "m"}
    return json.dumps({"schema_version": "ATIF-v1.7", "session_id": "s", "agent": agent, "steps": numbered, **root})


def turn(prompt: list[int], ids: list[int], **metrics: Any) -> dict[str, Any]:
    return {
        "source": "agent", "message": f"reply {ids[0]}", "timestamp": "2026-01-02T03:04:05Z",
        "metrics": {"prompt_token_ids": prompt, "completion_token_ids": ids, "logprobs": [-0.5] * len(ids), **metrics},
    }  # fmt: skip


def test_branches_of_other_producers_are_found_by_their_tokens() -> None:
    main = [
        {"source": "user", "message": "Do it."},
        turn([1, 2], [3, 4]),
        {**turn([1, 2, 3, 4, 5], [6]), "observation": {"results": [{"content": "ok"}]}},
        turn([1, 9], [10]),  # summarised: another context
        {"source": "agent", "message": "no tokens"},
    ]
    helper = json.loads(foreign([{"source": "user", "message": "Help."}, turn([20], [21, 22])], trajectory_id="h"))
    (imported,) = from_atif([foreign(main, subagent_trajectories=[helper])])
    assert (imported.calls, imported.without_tokens) == (4, 1)
    graph = BranchGraph.replay(imported.records, keep_bodies=True)
    check_invariants(graph)
    paths = [leaf.token_ids.tolist() for leaf in graph.leaves()]
    assert paths == [[1, 2, 3, 4, 5, 6], [1, 9, 10], [20, 21, 22]]
    assert [int(call) for call in graph.leaves()[0].path().call] == [-1, -1, 0, 0, -1, 1]
    assert graph.unique_tokens == 11
    assert graph.outcome is not None
    assert not graph.outcome.valid


def test_texts_of_other_producers_follow_their_turns() -> None:
    steps = [
        {"source": "user", "message": [{"type": "text", "text": "Do it."}]},
        {**turn([1, 2], [3, 4]), "observation": {"results": [{"source_call_id": None, "content": "ok"}]}},
        turn([1, 2, 3, 4, 5], [6]),
    ]
    (imported,) = from_atif([foreign(steps)])
    messages = as_messages(Conversations(BranchGraph.replay(imported.records, keep_bodies=True)).whole(1))
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "Do it."), ("assistant", "reply 3"), ("tool", "ok"), ("assistant", "reply 6"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema_version": "ATIF-v2.0", "steps": []}', foreign([turn([1], [2, 3], logprobs=[-1.0])])],
)
def test_what_is_no_atif_is_refused(text: str) -> None:
    with pytest.raises(CorruptRecordError):
        list(from_atif([text]))


def make_run(folder: Path) -> Path:
    log = folder / "executions" / "0123456789ab" / "wal.gyre"
    log.parent.mkdir(parents=True)
    log.write_bytes(file_header() + b"".join(encode(record, seq) for seq, record in enumerate(records())))
    (log.parent / "harness.log").write_text("said\n")
    return folder


def test_the_command_imports_documents_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app, run = make_app(), make_run(tmp_path / "run")
    assert app(["export", str(run), "--to", "atif", "-o", str(tmp_path / "atif")]) == 0
    target = tmp_path / "made"
    assert app(["import", str(tmp_path / "atif"), "--into", str(target)]) == 0
    (log,) = wal_paths(target)
    assert_same_branches(load_graph(log).graph, example())
    assert json.loads((target / "run.json").read_text())["harness"] == "looper"
    assert app(["import", str(run), "--into", str(target)]) == 0
    assert "1 were there already" in capsys.readouterr().out
    assert app(["import", str(run), "--into", str(tmp_path / "copy")]) == 0
    (copied,) = wal_paths(tmp_path / "copy")
    assert copied.read_bytes() == wal_paths(run)[0].read_bytes()
    assert (copied.parent / "harness.log").read_text() == "said\n"
    damaged = bytearray(wal_paths(run)[0].read_bytes())
    damaged[200] ^= 1
    wal_paths(run)[0].write_bytes(damaged)
    assert app(["import", str(run), "--into", str(tmp_path / "third")]) == 1
    assert "left out" in capsys.readouterr().out


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    app = make_app()
    with pytest.raises(ConfigError, match="name what to import"):
        app(["import"])
    with pytest.raises(ConfigError, match="is no ATIF document"):
        app(["import", str(tmp_path / "none"), "--into", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="into itself"):
        app(["import", str(run), "--into", str(run)])
