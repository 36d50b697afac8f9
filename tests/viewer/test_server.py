"""What the viewer's server answers, and to whom."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest

from benchmarks.viewer_runs import SYSTEM, Story, long_story, make_run
from gyre_sdk.capture.dialects.base import Dialect, Incoming
from gyre_sdk.capture.dialects.chat import ChatDialect
from gyre_sdk.capture.dialects.gemini import GeminiDialect
from gyre_sdk.capture.dialects.messages import MessagesDialect
from gyre_sdk.capture.dialects.responses import ResponsesDialect
from gyre_sdk.capture.model import Part, Tool
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.graph.segments import segments
from gyre_sdk.graph.views import first_own
from gyre_sdk.testing import tiny_tokenizer
from gyre_sdk.viewer import dialect_forms
from gyre_sdk.viewer.outline import BUDGET, PARTS, Outline, box_id, run_of
from gyre_sdk.viewer.runs import RunData
from gyre_sdk.viewer.server import Viewer
from gyre_sdk.viewer.texts import TokenTexts
from gyre_sdk.wire import WalReader
from gyre_sdk.wire.records import Intent, Result
from tests.viewer.conftest import EDGES, Open

pytestmark = pytest.mark.anyio


async def _json(client: httpx.AsyncClient, path: str) -> dict[str, object]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


# -- who may read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]:8000"])
async def test_a_foreign_host_name_is_refused_on_loopback(run: Path, open_client: Open, host: str) -> None:
    async with open_client(run) as client:
        for path in ("/", "/api/run", "/static/app.js"):
            assert (await client.get(path, headers={"host": host})).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST:99", "[::1]:8000"])
async def test_loopback_names_are_served(run: Path, open_client: Open, host: str) -> None:
    async with open_client(run) as client:
        assert (await client.get("/", headers={"host": host})).status_code == 200


async def test_with_a_token_nothing_is_served_without_it(run: Path, open_client: Open) -> None:
    async with open_client(run, token="s3cret", hosts=None, base_url="http://box.example") as client:
        for path in ("/", "/api/run", "/static/app.js", f"/api/executions/{EDGES}/graph", "/api/run?token=wrong"):
            assert (await client.get(path)).status_code == 401
        for headers in ({"cookie": "gyre_view=wrong"}, {"authorization": "Bearer wrong"}, {"cookie": '"'}):
            assert (await client.get("/api/run", headers=headers)).status_code == 401
        assert (await client.get("/api/run", headers={"authorization": "Bearer s3cret"})).status_code == 200
        first = await client.get("/?token=s3cret")
        assert first.status_code == 200
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert (await client.get("/api/run")).status_code == 200  # the client kept the cookie


async def test_nothing_but_reading(run: Path, open_client: Open) -> None:
    async with open_client(run) as client:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert (await client.request(method, "/api/run")).status_code == 405


async def test_every_answer_carries_the_strict_policy(run: Path, open_client: Open) -> None:
    async with open_client(run) as client:
        for path in ("/", "/static/app.css", "/api/run", "/api/executions/nope/graph", "/nowhere"):
            headers = (await client.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("name", ["%2e%2e%2frun.json", "..%2f..", "a%00b", "x" * 300, "%2fetc%2fpasswd", "nope"])
async def test_no_other_file_can_be_named(run: Path, open_client: Open, name: str) -> None:
    async with open_client(run) as client:
        for path in (f"/api/executions/{name}/graph", f"/static/{name}", f"/static/%2e%2e/{name}"):
            assert (await client.get(path)).status_code in (400, 404)


# -- the run -----------------------------------------------------------------------------------------------


async def test_the_run_lists_its_executions_steps_and_cells(run: Path, open_client: Open) -> None:
    async with open_client(run) as client:
        page = await _json(client, "/api/run")
    rows = {row["id"]: row for row in page["executions"]}  # type: ignore[attr-defined]
    assert len(rows) == 18
    log = run / "executions" / EDGES / "wal.gyre"
    graph, row = load_graph(log).graph, rows[EDGES]
    assert (row["calls"], row["tokens"]) == (len(graph.calls), _recorded(log))
    assert row["branches"] == len(graph.leaves())
    assert row["sampled"] == sum(len(call.output_ids) for call in graph.calls.values())
    assert row["kinds"] == {"forks": 1, "returns": 1, "retries": 1, "compacts": 1, "rerenders": 1}
    assert [span[2] for span in row["spans"]].count(2) == 1  # one failed call
    assert {span[2] for span in row["spans"]} == {0, 1, 2}  # some on another cell than the one before
    assert row["deadline"] == 600.0
    assert len(page["steps"]) == 8  # type: ignore[arg-type]
    cells = {cell["name"]: cell for cell in page["cells"]}  # type: ignore[attr-defined]
    assert set(cells) == {"cell0", "cell1"}
    assert [role for _, _, role in cells["cell0"]["roles"]][:3] == ["rollout", "training", "rollout"]
    assert 0 < cells["cell0"]["idle_rollout"] < 1


def _recorded(log: Path) -> int:
    """Tokens that the records hold: what prompts added and what was sampled."""
    count = 0
    for frame in WalReader(log).frames():
        record = frame.record()
        if isinstance(record, Intent):
            count += len(record.delta) // 4
        elif isinstance(record, Result):
            count += len(record.ids) // 4
    return count


def test_a_growing_log_is_followed_record_by_record(tmp_path: Path) -> None:
    story = long_story("00000000000a", 20, 900)
    story.seal(0.25)
    data = RunData(tmp_path)
    seen = []
    for upto in range(len(story.records) + 1):
        story.write(tmp_path, upto)
        stamp = data.update()
        page = data.page(since=stamp - 1)
        seen += [(row["calls"], row["status"]) for row in page["executions"]]
    assert seen[-1] == (20, "completed")
    assert [calls for calls, _ in seen] == sorted(calls for calls, _ in seen)
    fresh = RunData(tmp_path)
    fresh.update()
    assert fresh.page()["executions"] == data.page()["executions"]


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    stories = make_run(tmp_path, executions=3)
    path = stories[1].write(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    (tmp_path / "executions" / "empty").mkdir()
    (tmp_path / "executions" / "empty" / "wal.gyre").write_bytes(b"")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\nnot json\n{"step": 1, "lo')
    (tmp_path / "ledger.sqlite").write_bytes(b"no database")
    run = RunData(tmp_path)
    run.update()
    page = run.page()
    rows = {row["id"]: row for row in page["executions"]}
    assert set(rows) == {EDGES, "000000000001", "000000000002"}
    assert "damaged at byte" in rows["000000000001"]["message"]
    assert [step["step"] for step in page["steps"]] == [0]
    assert run.trained(EDGES).step is None


async def test_an_empty_run_is_a_page_too(tmp_path: Path, open_client: Open) -> None:
    (tmp_path / "executions").mkdir()
    async with open_client(tmp_path) as client:
        page = await _json(client, "/api/run")
    assert page["executions"] == []
    assert page["cells"] == []


async def test_changes_are_streamed(tmp_path: Path) -> None:
    make_run(tmp_path, executions=2)
    viewer = Viewer(tmp_path, poll_s=0.01)
    changes = viewer._changes(0, 0)
    assert (await anext(changes)).event == "hello"
    whole = await anext(changes)
    assert len(json.loads(whole.data or "")["executions"]) == 2
    story = long_story("00000000000b", 3, 100)
    story.write(tmp_path)
    more = json.loads((await anext(changes)).data or "")
    assert [row["id"] for row in more["executions"]] == ["00000000000b"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "reward": 0.5, "secret": "x"}\n')
    step = json.loads((await anext(changes)).data or "")
    assert step["steps"] == [{"step": 0, "reward": 0.5}]
    assert step["executions"] == []
    await changes.aclose()  # type: ignore[attr-defined]


# -- an execution ------------------------------------------------------------------------------------------


async def test_the_graph_shows_every_edge_with_its_reason(run: Path, open_client: Open) -> None:
    async with open_client(run) as client:
        page = await _json(client, f"/api/executions/{EDGES}/graph")
    edges = {edge["kind"]: edge for edge in page["edges"]}  # type: ignore[attr-defined]
    assert set(edges) == {"continues", "retries", "forks", "returns", "compacts", "rerenders"}
    assert edges["rerenders"]["reason"] == "message_edited"
    summary = page["summary"]
    assert summary["failed"] == [[7, "the engine is gone: connection reset"]]  # type: ignore[index]
    assert summary["trained"]["step"] == 3  # type: ignore[index]
    boxes = page["nodes"]
    graph = load_graph(run / "executions" / EDGES / "wal.gyre").graph
    assert sum(box["tokens"] for box in boxes) == graph.unique_tokens  # type: ignore[attr-defined]
    taken = sum(path["tokens"] for path in summary["trained"]["paths"])  # type: ignore[index]
    assert sum(box["trained"] for box in boxes) == taken > 0  # type: ignore[attr-defined]


def test_boxes_hold_each_token_once_however_they_are_opened(tmp_path: Path) -> None:
    story = long_story("00000000000c", 700, 9_000)
    graph = load_graph(story.write(tmp_path)).graph
    outline = Outline(graph)
    assert len(outline.boxes) <= BUDGET + PARTS
    opened: set[str] = set()
    for _ in range(3):
        outline = Outline(graph, opened)
        whole = [node.id for box in outline.boxes for node in box.nodes]
        assert len(whole) == len(set(whole))
        assert {outline.box_of(node).id for node in graph.nodes} <= {box.id for box in outline.boxes}
        for box in outline.boxes:
            assert [node.id for node in run_of(graph, box.id)] == [node.id for node in box.nodes]
        opened |= {box.id for box in outline.boxes if len(box.nodes) > 1 or box.folded}
    everything = {node.id for box in outline.boxes for node in box.nodes}
    assert len(everything) > 0.9 * len(graph.nodes)


def test_a_box_that_is_hidden_can_be_revealed(tmp_path: Path) -> None:
    story = Story("00000000000d")
    root = story.call([SYSTEM, Part("user", "start")], "go")
    for i in range(BUDGET + 30):
        story.call([Part("user", f"way {i}")], f"reply {i}" * (1 + i % 7), base=root)
    graph = load_graph(story.write(tmp_path)).graph
    hidden = next(node for node in graph.nodes.values() if Outline(graph).box_of(node.id).folded)
    assert _count(graph) > BUDGET
    folding = Outline(graph).boxes
    assert sum(box.folded for box in folding) + len({id(box.segment) for box in folding}) == _count(graph)
    leaf = next(
        leaf.nodes[-1]
        for leaf in graph.leaves()
        if all(leaf.nodes[-1] not in box.nodes for box in Outline(graph).boxes)
    )
    shown = Outline(graph, reveal=[leaf.id])
    assert leaf in shown.box_of(leaf.id).nodes
    assert hidden.id in graph.nodes


def _count(graph: BranchGraph) -> int:
    """Segments of a graph."""
    todo, count = list(segments(graph)), 0
    while todo:
        segment = todo.pop()
        todo.extend(segment.children)
        count += 1
    return count


async def test_search_finds_text_calls_and_roles(run: Path, open_client: Open) -> None:
    async with open_client(run) as client:
        found = await _json(client, f"/api/executions/{EDGES}/search?q=sed%20-i")
        assert found["hits"] == 2  # the reply that was lost, and its retry
        assert len((await _json(client, f"/api/executions/{EDGES}/search?q=auxiliary"))["boxes"]) == 1  # type: ignore[arg-type]
        assert (await _json(client, f"/api/executions/{EDGES}/search?q="))["hits"] == 0
        assert (await _json(client, f"/api/executions/{EDGES}/search?q=nowhere-to-be-found"))["hits"] == 0


# -- a box -------------------------------------------------------------------------------------------------


async def test_tokens_of_a_box_come_in_pages_and_spell_its_text(tmp_path: Path, open_client: Open) -> None:
    run = tmp_path / "r"
    make_run(run, executions=1)
    story = long_story("00000000000e", 60, 12_000)
    graph = load_graph(story.write(run)).graph
    box = max(Outline(graph).boxes, key=lambda b: sum(map(len, b.nodes)))
    texts, ids, start = [], [], 0
    async with open_client(run) as client:
        while True:
            page = await _json(client, f"/api/executions/{graph.execution}/box/{box.id}?from={start}")
            texts += [token[1] for token in page["tokens"]]  # type: ignore[attr-defined]
            ids += [token[0] for token in page["tokens"]]  # type: ignore[attr-defined]
            if page["next"] is None:
                break
            start = page["next"]  # type: ignore[assignment]
        assert start > 0
        whole = await _json(client, f"/api/executions/{graph.execution}/box/{box.id}/text")
    assert "".join(texts) == whole["text"]
    assert ids == [int(i) for node in box.nodes for i in node.token_ids]


async def test_logprobs_and_versions_belong_to_their_tokens(run: Path, open_client: Open) -> None:
    graph = load_graph(run / "executions" / EDGES / "wal.gyre").graph
    call = graph.calls[4]
    async with open_client(run) as client:
        page = await _json(client, f"/api/executions/{EDGES}/box/c4")
    tokens = page["tokens"]
    assert [t[2] for t in tokens] == pytest.approx([float(p) for p in call.logprobs], abs=1e-4)  # type: ignore[attr-defined]
    assert [t[3] for t in tokens] == [int(v) for v in call.version_at(range(len(call.output_ids)))]  # type: ignore[attr-defined]
    assert page["orphan"] is True
    assert page["weight"] == 0


@pytest.mark.parametrize("box", ["nope", "c0:0", "c0:999999", "c0:-1", "c0:x", "..", "c0:1:1"])
async def test_a_box_that_is_not_there_is_a_clear_404(run: Path, open_client: Open, box: str) -> None:
    async with open_client(run) as client:
        answer = await client.get(f"/api/executions/{EDGES}/box/{box}")
    assert answer.status_code == 404
    assert len(answer.text) < 300


@pytest.mark.parametrize(
    ("call", "kind", "removed", "added"),
    [
        (5, "retries", "", "g"),
        (8, "rerenders", "", ", quickly"),
        (10, "compacts", "Fix the parser", "We fixed the offset"),
    ],
)
async def test_the_diff_says_exactly_what_changed(
    run: Path, open_client: Open, call: int, kind: str, removed: str, added: str
) -> None:
    graph = load_graph(run / "executions" / EDGES / "wal.gyre").graph
    outline = Outline(graph)
    own = first_own(graph.calls[call])
    assert own is not None
    async with open_client(run) as client:
        diff = await _json(client, f"/api/executions/{EDGES}/box/{outline.box_of(own.id).id}/diff")
    assert (diff["kind"], diff["mine"]) == (kind, call)
    parts: list[list[str]] = diff["parts"]  # type: ignore[assignment]
    assert added in "".join(text for tag, text in parts if tag == "added")
    assert removed in "".join(text for tag, text in parts if tag == "removed")
    old, new = diff["same_before"] + diff["removed"] + diff["same_after"], diff["removed_ids"]  # type: ignore[operator]
    assert old > 0
    assert isinstance(new, list)


async def test_requests_and_replies_are_shown_in_the_harness_dialect(run: Path, open_client: Open) -> None:
    async with open_client(run) as client:
        request = json.loads((await _json(client, f"/api/executions/{EDGES}/box/c1/request"))["text"])  # type: ignore[arg-type]
        reply = json.loads((await _json(client, f"/api/executions/{EDGES}/box/c1/reply"))["text"])  # type: ignore[arg-type]
        record = json.loads((await _json(client, f"/api/executions/{EDGES}/box/c1/record"))["text"])  # type: ignore[arg-type]
    assert [m["role"] for m in request["messages"]] == ["system", "user", "assistant", "user"]
    assert request["messages"][2]["content"] == "I look at the file. cat parse.py"
    assert request["tools"][0]["function"]["name"] == "bash"
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"]["content"] == "Now I ask a helper about headers."
    assert record["base_call"] == 0


PARTS_SAID = [
    Part("system", "Be careful."),
    Part("user", "List the files."),
    Part("reasoning", "I should call ls."),
    Part("text", "Listing."),
    Part("call", '{"command":"ls"}', name="bash", call_id="t1"),
    Part("result", "a.py", name="bash", call_id="t1"),
]


@pytest.mark.parametrize(
    ("dialect", "form", "path"),
    [
        (ChatDialect(), dialect_forms.chat_request, "/v1/chat/completions"),
        (MessagesDialect(), dialect_forms.messages_request, "/v1/messages"),
        (ResponsesDialect(), dialect_forms.responses_request, "/v1/responses"),
        (GeminiDialect(), dialect_forms.gemini_request, "/v1beta/models/m:generateContent"),
    ],
    ids=["chat", "messages", "responses", "gemini"],
)
def test_a_rebuilt_request_means_what_was_recorded(dialect: Dialect, form: object, path: str) -> None:
    """The dialect's own reader gets the same parts and tools back."""
    tool = Tool("bash", "Run", {"type": "object", "properties": {"command": {"type": "string"}}})
    body = {"model": "m", "max_tokens": 5, **form(PARTS_SAID, [tool])}  # type: ignore[operator]
    incoming = Incoming(msgspec.json.encode(body), {}, path, path_params={"target": "m:generateContent"})
    parsed = dialect.parse(incoming)
    parts = [part for item in parsed.items for part in item.read(bytes(item.raw))]
    strip = [(part.kind, part.text.replace(" ", "")) for part in parts]
    assert strip == [(part.kind, part.text.replace(" ", "")) for part in PARTS_SAID]
    tools = parsed.read_tools(parsed.tools_raw)
    assert [(t.name, t.parameters) for t in tools] == [(tool.name, tool.parameters)]


async def test_without_a_tokenizer_tokens_are_numbers(run: Path, tmp_path: Path, open_client: Open) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("model"))
    (folder / "run.json").write_text("{}")
    async with open_client(folder) as client:
        page = await _json(client, f"/api/executions/{EDGES}/graph")
        tokens = (await _json(client, f"/api/executions/{EDGES}/box/c0"))["tokens"]
    assert "by their numbers" in page["summary"]["tokenizer"]  # type: ignore[index]
    assert all(text == f"⟨{number}⟩" for number, text, *_ in tokens)  # type: ignore[attr-defined]


def test_a_character_of_several_tokens_stands_with_the_last(run: Path) -> None:
    texts = TokenTexts(run / "model")
    whole = "naïve 日本 🙂 ok"
    ids = tiny_tokenizer().encode(whole, add_special_tokens=False).ids
    pieces = texts.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == whole


def test_box_ids_name_runs(tmp_path: Path) -> None:
    graph = load_graph(long_story("00000000000f", 5, 200).write(tmp_path)).graph
    (root,) = segments(graph)
    assert run_of(graph, box_id(root.nodes)) == root.nodes
