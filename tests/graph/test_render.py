"""What people see of a graph, also of a killed, damaged or hostile one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from rich.console import Console

from gyre_sdk.errors import ConfigError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import find_log, load_graph
from gyre_sdk.graph.render import clean, render_graph, why_rows
from gyre_sdk.graph.segments import Segment, segments
from gyre_sdk.wire import encode, file_header, pack_ids
from gyre_sdk.wire.records import Failed, Intent, Opened, Outcome, Sealed
from tests.exporters.examples import example, records
from tests.graph.programs import Harness, Step, programs


def shown(graph: BranchGraph, **options: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(render_graph(graph, **options))  # type: ignore[arg-type]
        return console.export_text()


def test_the_tree_names_roles_edges_and_costs() -> None:
    text = shown(example(), why=True)
    for part in (
        "completed, reward 0.5",
        "8 calls, 1 failed",
        "main-summary  calls 3-4",
        "retry of call 2: same prompt",
        "forked by call 0",
        "returns from call 1",
        "compacted from call 4: summary reappears (inferred)",
        "re-render of call 0: message_edited",
        "orphan",
        "call 7 failed EngineGoneError",
        "why each branch exists",
    ):
        assert part in text
    assert "\x1b" not in text


@given(programs)
def test_segments_hold_every_node_once_and_costs_add_up(program: list[Step]) -> None:
    graph = Harness().run(program).graph
    found: list[str] = []
    leaves: list[int] = []
    todo: list[Segment] = segments(graph)
    while todo:
        segment = todo.pop()
        found.extend(node.id for node in segment.nodes)
        todo.extend(segment.children)
        assert len(segment.children) != 1
        if segment.leaf_call >= 0:
            leaves.append(segment.leaf_call)
            assert not segment.children
    assert sorted(found) == sorted(graph.nodes)
    assert sorted(leaves) == [leaf.call for leaf in graph.leaves()]
    rows = why_rows(graph)
    assert sum(int(row[4].replace(",", "")) + int(row[5].replace(",", "")) for row in rows) == graph.unique_tokens
    shown(graph, why=True)


def test_hostile_text_is_inert() -> None:
    nasty = "\x1b]0;owned\x07[bold]x[/bold]\u202e<script>\n" + "y" * 10**6
    graph = BranchGraph.replay(
        [
            Opened(execution=nasty, at=0.0, task=nasty, harness=nasty),
            Intent(call=0, at=1.0, dialect="chat", delta=pack_ids([1])),
            Failed(call=0, at=2.0, error=nasty),
            Sealed(at=3.0, outcome=Outcome(status="harness_error", message=nasty)),
        ]
    )
    text = shown(graph, why=True)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[bold]x[/bold]" in text
    assert len(text) < 5000
    assert clean("a\tb\n c") == "a b c"


def test_a_killed_run_is_read(tmp_path: Path) -> None:
    frames = [encode(record, seq) for seq, record in enumerate(records())]
    log = tmp_path / "executions" / "0123456789ab" / "wal.gyre"
    log.parent.mkdir(parents=True)
    log.write_bytes(file_header() + b"".join(frames[:9]) + frames[9][:20])
    loaded = load_graph(log)
    assert "unfinished record" in loaded.problem
    text = shown(loaded.graph, problem=loaded.problem)
    assert "not sealed" in text
    assert "unfinished record" in text
    assert "1 pending" in text
    damaged = bytearray(log.read_bytes())
    damaged[200] ^= 1
    log.write_bytes(damaged)
    assert "damaged" in load_graph(log).problem
    log.write_bytes(b"")
    with pytest.raises(ConfigError, match="nothing can be read"):
        load_graph(log)
    with pytest.raises(ConfigError, match="no log"):
        load_graph(tmp_path / "x")


def test_executions_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    for name in ("aab1", "aab2", "aab"):
        folder = tmp_path / "executions" / name
        folder.mkdir(parents=True)
        (folder / "wal.gyre").write_bytes(b"")
    assert find_log(tmp_path, "aab2").parent.name == "aab2"
    assert find_log(tmp_path, "aab").parent.name == "aab"
    with pytest.raises(ConfigError, match="not unique"):
        find_log(tmp_path, "aa")
    with pytest.raises(ConfigError, match="no execution"):
        find_log(tmp_path, "b")


def test_a_long_execution_is_drawn_without_recursion() -> None:
    graph = BranchGraph.replay([Opened(execution="e", at=0.0)])
    from gyre_sdk.capture.model import Reply
    from tests.exporters.examples import _result

    length = 0
    for call in range(300):
        graph.apply(
            Intent(call=call, at=1.0, dialect="chat", base_call=call - 1, base_len=length, delta=pack_ids([call % 7]))
        )
        graph.apply(_result(call, [1, 2], Reply()))
        if call % 2:
            length += 3
        else:
            # Every second reply is cut short, so that the tree is as deep as it is long.
            length += 2
    assert "orphan" in shown(graph)
