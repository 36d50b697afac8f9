"""The page as people use it, in headless Chromium (`make test-viewer`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.viewer_runs import SYSTEM, Story, every_edge, long_story, make_run
from gyre_sdk.capture.model import Part
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.wire import encode
from gyre_sdk.wire.records import Event, Opened, Outcome, Sealed
from tests.viewer.browsing import Serve, box_of, drawn, ended, open_box, selected, wait
from tests.viewer.conftest import EDGES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.viewer, pytest.mark.timeout(900)]

# -- the levels --------------------------------------------------------------------------------------------


def test_a_run_opens_with_its_table_timeline_plots_and_cells(run: Path, serve: Serve, page: Page) -> None:
    page.goto(serve(run))
    page.wait_for_selector("#executions tbody tr")
    assert page.locator("#executions tbody tr").count() == 18
    assert page.locator("#cells tr").count() == 2
    names = page.locator("figcaption b").all_inner_texts()
    assert {"reward", "loss", "staleness, versions", "sharing"} <= set(names)
    lane = page.locator(f"tr[data-id='{EDGES}'] svg.lane")
    assert {"wait", "call", "moved", "failed", "deadline"} <= {
        p.get_attribute("class") for p in lane.locator("path").all()
    }
    assert page.locator("#cells path.training").count() > 2
    page.click("th button[data-sort=calls]")
    calls = [int(text) for text in page.locator("#executions tbody td:nth-child(6)").all_inner_texts()]
    assert calls == sorted(calls)
    page.fill("#search", "invalid")
    page.fill("#search", "environment_error")
    wait(page, "document.querySelectorAll('#executions tbody tr').length === 2")
    assert page.locator("#found").inner_text() == "2 of 18"


def test_an_execution_opens_with_its_edges_and_what_was_trained(run: Path, serve: Serve, page: Page) -> None:
    page.goto(serve(run))
    page.click(f"tr[data-id='{EDGES}']")
    graph = load_graph(run / "executions" / EDGES / "wal.gyre").graph
    assert drawn(page) >= len(graph.leaves())
    labels = page.evaluate("state.cy.edges().map((e) => [e.data('kind'), e.data('label'), e.style('line-style')])")
    by_kind = {kind: (label, line) for kind, label, line in labels}
    assert by_kind["rerenders"] == ("rerenders: message_edited", "dashed")
    assert by_kind["returns"][1] == "dotted"
    assert by_kind["forks"] == ("forks: the prompt of a tool call reappears", "solid")
    chip = page.locator("#taken button").first
    assert "weight" in chip.inner_text()
    assert "trained in step 3" in page.locator("#taken").inner_text()
    chip.click()
    path = page.evaluate("state.cy.nodes('.path').map((n) => n.data('trained'))")
    assert sum(path) > 0
    widths = page.evaluate("state.cy.nodes().map((n) => [n.data('tokens'), n.width()])")
    assert [w for _, w in sorted(widths)] == sorted(w for _, w in widths)
    assert "Call 7 failed" in page.locator("main").inner_text()


def test_boxes_are_expanded_and_collapsed(tmp_path: Path, serve: Serve, page: Page) -> None:
    make_run(tmp_path, executions=1)
    long_story("00000000000a", 120, 4_000).write(tmp_path)
    page.goto(f"{serve(tmp_path)}#/x/00000000000a")
    few = drawn(page)
    wide = page.evaluate("state.graph.nodes.filter((n) => n.nodes > 20)[0]")
    page.evaluate(f"void state.cy.getElementById({json.dumps(wide['id'])}).select()")  # the element itself is no value
    page.focus("#graph")
    page.keyboard.press("e")
    many = drawn(page, f"> {few}")
    assert many >= few + 20
    assert page.evaluate("state.graph.nodes.reduce((s, n) => s + n.tokens, 0)") == page.evaluate(
        "state.graph.summary.unique"
    )
    page.keyboard.press("e")  # a part that is a run itself
    more = drawn(page, f"> {many}")
    page.keyboard.press("c")
    assert drawn(page, f"< {more}") == many
    page.keyboard.press("c")
    assert drawn(page, f"< {many}") == few
    page.keyboard.press("a")
    assert drawn(page, f"> {few}") > few
    page.keyboard.press("a")
    assert drawn(page, f"=== {few}") == few


def test_search_finds_text_inside_boxes(run: Path, serve: Serve, page: Page) -> None:
    page.goto(f"{serve(run)}#/x/{EDGES}")
    drawn(page)
    page.keyboard.press("/")
    page.keyboard.type("sed -i")
    wait(page, "document.getElementById('found').textContent === '2 hits in 2 boxes'")
    first = selected(page)
    assert page.evaluate("state.cy.nodes('.found').length") == 2
    page.keyboard.press("Enter")
    wait(page, "document.body.dataset.box !== ''")
    page.keyboard.press("n")
    assert selected(page) != first


def test_a_box_shows_tokens_versions_and_both_sides_in_the_dialect(run: Path, serve: Serve, page: Page) -> None:
    url = serve(run)
    open_box(page, url, EDGES, "c4")
    tokens = page.locator(".tokens span")
    call = load_graph(run / "executions" / EDGES / "wal.gyre").graph.calls[4]
    assert tokens.count() == len(call.output_ids)
    assert f"logprob {round(float(call.logprobs[0]), 4)}" in (tokens.first.get_attribute("title") or "")
    assert page.locator(".tokens b").all_inner_texts() == ["v0", "v1"]
    heats = [tokens.nth(i).evaluate("(n) => getComputedStyle(n).backgroundColor") for i in range(6)]
    assert len(set(heats)) > 2
    page.click("[data-tab=request]")
    page.wait_for_selector("#panel pre")
    assert "role" in json.loads(page.locator("#panel pre").inner_text())["messages"][0]
    page.click("[data-tab=reply]")
    wait(page, "document.querySelector('#panel').textContent.includes('chat.completion')")
    page.click("[data-tab=text]")
    wait(page, "document.querySelector('#panel').textContent.includes('sed -i s/15/16/ parse.py')")


@pytest.mark.parametrize(("call", "kind", "added"), [(5, "retries", "g"), (8, "rerenders", ", quickly")])
def test_the_diff_shows_exactly_what_changed(
    run: Path, serve: Serve, page: Page, call: int, kind: str, added: str
) -> None:
    url = serve(run)
    page.goto(f"{url}#/x/{EDGES}")
    drawn(page)
    box = box_of(page, call)
    page.evaluate(f"look({json.dumps(box)})")
    wait(page, f"document.body.dataset.box === {json.dumps(box)}")
    page.keyboard.press("d")
    page.wait_for_selector("pre.diff")
    assert kind in page.locator("#panel .note").first.inner_text()
    assert added in "".join(page.locator("pre.diff ins").all_inner_texts())


# -- live --------------------------------------------------------------------------------------------------


def test_the_page_follows_a_run(tmp_path: Path, serve: Serve, page: Page) -> None:
    make_run(tmp_path, executions=1)
    story = long_story("00000000000b", 8, 400, at=time.time() - 30)
    half = next(i for i, r in enumerate(story.records) if getattr(r, "call", -1) == 4)
    path = story.write(tmp_path, half)
    page.goto(serve(tmp_path))
    row = page.locator("tr[data-id='00000000000b']")
    row.wait_for()
    assert "running" in row.inner_text()
    row.focus()
    with path.open("ab") as file:
        file.writelines(encode(record, seq) for seq, record in enumerate(story.records) if seq >= half)
    wait(page, "document.querySelector(\"tr[data-id='00000000000b'] td:nth-child(6)\").textContent === '8'")
    assert page.evaluate("document.activeElement.dataset.id") == "00000000000b"  # the reader's place is kept
    page.keyboard.press("Enter")
    drawn(page)
    before = page.evaluate("state.graph.summary.calls")
    more = story.call([Part("user", "and now?")], "one more reply", base=7)
    story.seal(0.75)
    with path.open("ab") as file:
        file.writelines(encode(r, i) for i, r in enumerate(story.records) if i >= _first(story, more))
    wait(page, "state.graph.summary.reward === 0.75")
    assert page.evaluate("state.graph.summary.calls") == before + 1
    page.keyboard.press("Escape")
    every_edge("00000000000c").write(tmp_path)
    page.wait_for_selector("tr[data-id='00000000000c']")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.25}\n')
    wait(page, "document.querySelector('figcaption')?.textContent.includes('0.2500')")


def _first(story: Story, call: int) -> int:
    return next(i for i, record in enumerate(story.records) if getattr(record, "call", -1) == call)


def test_a_server_that_ends_is_noticed_and_found_again(run: Path, serve: Serve, page: Page, free_port: int) -> None:
    child = subprocess.Popen(
        [str(Path(sys.executable).with_name("gyre")), "view", str(run), "--no-browser", "--port", str(free_port)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    page.goto(f"http://127.0.0.1:{free_port}")
    page.wait_for_selector("#live.on")
    assert ended(child) == 0
    page.wait_for_selector("#live:not(.on)")
    assert page.locator("#executions tbody tr").count() == 18  # what was there can still be read
    serve(run, "--port", str(free_port))
    page.wait_for_selector("#live.on")


@pytest.fixture
def free_port() -> int:
    import socket

    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- hostile text ------------------------------------------------------------------------------------------

SCRIPTS = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'><svg onload=window.hacked=3>"
    "<a href='javascript:window.hacked=4'>x</a>\"'><iframe srcdoc='<script>parent.hacked=5</script>'>"
)
ANSI = "\x1b[31mred\x1b]0;title\x07\x9b2J"
TURNED = "abc\u202egnp.exe\u2066\u200f"
LONG = "A" * 1_000_000


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run in which every text that comes from outside is an attack."""
    make_run(tmp_path, executions=1)
    bad = SCRIPTS + ANSI + TURNED
    story = Story("0000000000ff", task=bad, group=bad, dialect="chat", at=time.time() - 60)
    first = story.call([Part("system", bad), Part("user", bad)], bad)
    story.call([Part("user", LONG)], LONG[:50_000], base=first)
    story.call([SYSTEM, Part("user", bad)], "x", rerender=bad, of=first)
    story.call([Part("user", bad)], "y", link=("compacts", first, bad))
    story.call([Part("user", "z")], "", base=first, fail=bad)
    story.records.append(Event(name=bad, at=story.at))
    outcome = Outcome(status="completed", reward=0.5, valid=True, message=bad, metrics={bad: 1.0})
    opened = story.records[0]
    assert isinstance(opened, Opened)
    story.records.append(Sealed(at=story.at + 1, outcome=outcome))
    story.write(tmp_path)
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, "harness": bad, "kind": bad}))
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"at": story.at, "event": "rollout to training", "cell": bad}) + "\n"
    )
    return tmp_path


def test_hostile_text_is_inert(hostile: Path, serve: Serve, page: Page) -> None:
    page.goto(serve(hostile))
    page.wait_for_selector("tr[data-id='0000000000ff']")
    _inert(page)
    assert SCRIPTS in page.locator("tr[data-id='0000000000ff']").inner_text()
    page.fill("#search", "<script>")
    wait(page, "document.querySelectorAll('#executions tbody tr').length === 1")
    page.click("tr[data-id='0000000000ff']")
    drawn(page)
    _inert(page)
    labels = " ".join(page.evaluate("state.cy.edges().map((e) => e.data('label'))"))
    assert "<script>" in labels  # drawn on a canvas, as it is
    assert "\u202e" not in labels
    for box in page.evaluate("state.graph.nodes.map((n) => n.id)"):
        page.evaluate(f"look({json.dumps(box)})")
        wait(page, f"document.body.dataset.box === {json.dumps(box)}")
        for tab in page.locator("[role=tab]").all():
            tab.click()
            wait(
                page,
                f"document.querySelector('[aria-selected=true]').dataset.tab === '{tab.get_attribute('data-tab')}'",
            )
            page.wait_for_selector("#panel *")
            _inert(page)


def _inert(page: Page) -> None:
    """No attack ran, none became an element, none can steer the reader's terminal or reading direction."""
    assert page.evaluate("window.hacked") is None
    found: dict[str, Any] = page.evaluate(
        """() => ({
          elements: document.querySelectorAll('main script, aside script, img, iframe, svg[onload], [onerror], a[href^=javascript]').length,
          text: document.documentElement.textContent + document.title,
        })"""
    )
    assert found["elements"] == 0
    assert not set(found["text"]) & set("\x1b\x07\x9b\u202e\u2066\u200f")


def test_a_line_of_a_megabyte_neither_stalls_nor_stretches_the_page(hostile: Path, serve: Serve, page: Page) -> None:
    url = serve(hostile)
    page.goto(f"{url}#/x/0000000000ff")
    drawn(page)
    box = page.evaluate("state.graph.nodes.sort((a, b) => b.tokens - a.tokens)[0].id")
    page.evaluate(f"look({json.dumps(box)})")
    wait(page, f"document.body.dataset.box === {json.dumps(box)}")
    page.click("[data-tab=text]")
    wait(page, "document.querySelector('#panel').textContent.length > 150000")
    assert page.evaluate("document.querySelector('#panel').textContent.length") < 250_000  # the rest is behind "more"
    assert page.evaluate("document.querySelector('aside').scrollWidth <= document.querySelector('aside').clientWidth")
    page.click("#panel button")
    wait(page, "document.querySelector('#panel').textContent.length > 350000")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# -- hands and eyes ----------------------------------------------------------------------------------------


def test_everything_is_reached_by_keyboard_alone(run: Path, serve: Serve, page: Page) -> None:
    page.goto(serve(run))
    page.wait_for_selector("#executions tbody tr")
    press = page.keyboard.press
    press("j")
    press("j")
    press("k")
    assert page.evaluate("document.activeElement.dataset.id") == EDGES
    press("Enter")
    drawn(page)
    press("ArrowRight")
    start = selected(page)
    press("ArrowRight")
    assert selected(page) != start
    press("ArrowLeft")
    assert selected(page) == start
    press("j")
    press("Enter")
    wait(page, "document.body.dataset.box !== ''")
    for number, tab in enumerate(("tokens", "text", "request", "reply", "record"), 1):
        press(str(number))
        wait(page, f"document.querySelector('[aria-selected=true]').dataset.tab === '{tab}'")
    press("i")
    assert page.locator("aside.ids").count() == 1
    assert page.locator("#said").inner_text() != ""
    press("Escape")
    wait(page, "document.body.dataset.level === 'execution'")
    press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    press("Escape")
    assert page.evaluate("document.activeElement.id") == "graph"
    press("Escape")
    wait(page, "document.body.dataset.level === 'run'")
    assert page.evaluate("document.activeElement.dataset.id") == EDGES  # back where we came from


def test_tab_reaches_every_control_and_shows_where_it_is(run: Path, serve: Serve, page: Page) -> None:
    page.goto(f"{serve(run)}#/x/{EDGES}/n/c4")
    wait(page, "document.body.dataset.box === 'c4'")
    seen = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or page.evaluate("document.activeElement === document.body")
    assert {"search", "theme", "graph", "tokens", "request", "ids"} <= seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(run: Path, serve: Serve, browser: Browser, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{serve(run)}#/x/{EDGES}/n/c4")
    wait(page, "document.body.dataset.box === 'c4'")
    for name in ("--fg", "--dim", "--accent", "--good", "--bad", "--warn"):
        assert _contrast(page, name, "--bg") >= 4.5, name
    assert _contrast(page, "--fg", "--soft") >= 7
    other = {"light": "dark", "dark": "light"}[scheme]
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    while page.locator("#theme").inner_text() != other:
        page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    wait(page, "document.body.dataset.box === 'c4'")
    assert page.locator("#theme").inner_text() == other  # it is remembered
    context.close()


def _contrast(page: Page, ink: str, paper: str) -> float:
    """WCAG contrast of two of the page's colours."""
    lights = []
    for name in (ink, paper):
        rgb = page.evaluate(
            """(name) => { const n = document.createElement('i'); n.style.color = `var(${name})`; document.body.append(n);
            const c = getComputedStyle(n).color; n.remove(); return c.match(/[\\d.]+/g).slice(0, 3).map(Number); }""",
            name,
        )
        parts = [v / 255 / 12.92 if v / 255 <= 0.03928 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
        lights.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    return float((max(lights) + 0.05) / (min(lights) + 0.05))


# -- empty, refused ----------------------------------------------------------------------------------------


def test_empty_states_say_what_is_missing(tmp_path: Path, serve: Serve, page: Page) -> None:
    (tmp_path / "run.json").write_text('{"kind": "run"}')
    (tmp_path / "executions").mkdir()
    url = serve(tmp_path)
    page.goto(url)
    page.wait_for_selector(".empty")
    assert "No execution has been recorded" in page.locator(".empty").inner_text()
    assert "trains nothing" in page.locator("main").inner_text()
    waiting = Story("00000000000d", at=time.time())
    waiting.write(tmp_path)
    page.click("tr[data-id='00000000000d']")
    page.wait_for_selector("main .empty")
    assert "no call yet" in page.locator(".empty").inner_text()
    waiting.call([Part("user", "hello")], "", pending=True)
    waiting.write(tmp_path)
    wait(page, "document.querySelector('.empty')?.textContent.includes('has a reply yet')")


def test_the_token_opens_the_page_and_leaves_the_address(run: Path, serve: Serve, page: Page) -> None:
    url = serve(run, "--token")
    assert "?token=" in url
    page.goto(url)
    page.wait_for_selector("#executions tbody tr")
    assert "token" not in page.url
    page.wait_for_selector("#live.on")
    page.reload()
    page.wait_for_selector("#executions tbody tr")
    assert page.evaluate("document.cookie") == ""  # no script can read it
