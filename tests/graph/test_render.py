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
from gyre_sdk.wire import encode, file_header, pack_floats, pack_ids
from gyre_sdk.wire.records import Failed, Intent, Opened, Outcome, Result, Sealed, Span
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


def reasons(*intents: Intent, finish: str = "stop") -> list[str]:
    """The `because` of every branch of calls with these prompts, each of which is answered with three tokens."""
    graph = BranchGraph.replay([Opened(execution="e", at=0.0)])
    for intent in intents:
        graph.apply(intent)
        ids = [50 + 3 * intent.call + place for place in range(3)]
        graph.apply(
            Result(
                call=intent.call,
                at=2.0,
                ids=pack_ids(ids),
                logprobs=pack_floats([-1.0] * 3),
                versions=(Span(0, 0, 3),),
                finish=finish,  # type: ignore[arg-type]
            )
        )
    return [row[2] for row in why_rows(graph)]


def ask(call: int, delta: list[int], base_call: int = -1, base_len: int = 0) -> Intent:
    return Intent(call=call, at=1.0, dialect="chat", base_call=base_call, base_len=base_len, delta=pack_ids(delta))


def test_a_branch_without_an_edge_has_a_reason_too() -> None:
    first = ask(0, [1, 2, 3])
    assert reasons(first) == ["a context of its own"]
    # The template's last tokens differ when the reply is left out: the base ends before the prompt does.
    assert reasons(first, ask(1, [9, 3], 0, 2), finish="length")[1] == (
        "the harness went on from call 0 without its reply (which ended by length)"
    )
    assert (
        reasons(first, ask(1, [9], 0, 5))[1] == "the harness went on from call 0 after 2 of the 3 tokens of its reply"
    )
    assert (
        reasons(first, ask(1, [7], 0, 6), ask(2, [8], 0, 6))[1]
        == "goes on from call 0, beside another branch that does"
    )
    assert reasons(first, ask(1, [1, 2, 9]))[1] == "shares its first 2 tokens with call 0, then differs"


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
