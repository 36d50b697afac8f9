"""A browser, `gyre view` as a child process, and what tests ask of a page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("GYRE_CHROMIUM") or shutil.which("chromium") or "chromium"
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts `gyre view` on a run and gives its address; ended with Ctrl-C, which must work."""
    children: list[subprocess.Popen[str]] = []

    def start(run: Path, *options: str) -> str:
        command = [str(Path(sys.executable).with_name("gyre")), "view", str(run), "--no-browser", *options]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        return child.stdout.readline().split(": ", 1)[1].strip()

    yield start
    for child in children:
        assert ended(child) == 0


def ended(child: subprocess.Popen[str]) -> int:
    """Exit code after Ctrl-C."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    with child:
        return child.wait(60)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which no script may fail, no policy be broken and nothing be asked of another host."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" and "net::ERR_" not in m.text else None)
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith("http://127.0.0.1:") else None)
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    yield page
    context.close()
    assert problems == []


def wait(page: Page, condition: str, seconds: float = 60) -> None:
    """Until an expression is true. (Playwright's own way needs `eval`, which the page's policy forbids.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, (
            f"waited in vain for {condition}; the page says: {page.inner_text('body')[:1500]}"
        )
        page.wait_for_timeout(25)


def drawn(page: Page, boxes: str = "> 0") -> int:
    """Wait until the graph is drawn; how many boxes it has."""
    wait(page, f"Number(document.body.dataset.drawn) {boxes}")
    return int(page.evaluate("document.body.dataset.drawn"))


def selected(page: Page) -> str:
    return str(page.evaluate("state.cy.nodes(':selected').map((n) => n.id()).join()"))


def open_box(page: Page, url: str, execution: str, box: str) -> None:
    page.goto(f"{url}#/x/{execution}/n/{box}")
    wait(page, f"document.body.dataset.box === {json.dumps(box)}")


def box_of(page: Page, call: int) -> str:
    """The box in which a call's new tokens begin."""
    found = page.evaluate(f"state.graph.edges.find((e) => e.kind !== 'continues' && e.calls[1] === {call}).target")
    return str(found)
