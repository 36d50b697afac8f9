"""How long a person waits for the viewer, in headless Chromium.

    python -m benchmarks.viewer [--quick] [--json FILE] [--chromium PATH]

open_s       an execution of 2,000 calls and 1M unique tokens: from the navigation until its graph is drawn
list_s       a run of 1,000 executions of 12 calls: from the navigation until every row is in the table
expand_s     opening a collapsed segment of the large execution, until it is drawn again
click_s      clicking a box, until its tokens are there
search_s     the first search of all its texts, and again (`search_again_s`)
frame_ms     mean time between frames while the large graph is panned

Each number is the median of five (three with --quick); for `open_s` and `list_s` each time a new server, so that nothing was
read before it started. The page itself says when it is done (`performance.now()`, which counts from the navigation).
`*_page_cpu_s` and `*_server_cpu_s` are the processor seconds in it of the page's main thread and of the server since it was
ready: what other load on the machine does not change much.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.viewer_runs import long_story, make_run, training_files

LARGE = "fedcba987654"
FRAMES = """() => new Promise((done) => {
  const begun = performance.now();
  let frames = 0;
  const next = () => {
    state.cy.panBy({ x: frames % 40 < 20 ? 9 : -9, y: 0 });
    if (++frames === 60) done((performance.now() - begun) / frames); else requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})"""


@contextmanager
def served(run: Path) -> Iterator[tuple[str, int]]:
    """`gyre view` on a run, as a user starts it; yields the address and the process id."""
    command = [str(Path(sys.executable).with_name("gyre")), "view", str(run), "--no-browser"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child.stdout.readline().split(": ", 1)[1].strip(), child.pid
    finally:
        child.terminate()
        with child:
            child.wait(60)


def until(page: Any, condition: str) -> float:
    """Seconds from the navigation until a condition holds and a frame was drawn with it."""
    page.wait_for_function(condition, polling="raf", timeout=60_000)
    return float(
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done(performance.now() / 1e3)))")
    )


def opened(browser: Any, run: Path, place: str, condition: str) -> tuple[float, float, float]:
    """One cold opening, in a new browser context, of a new server: seconds, and processor seconds of page and server."""
    with served(run) as (url, pid):
        context = browser.new_context(
            viewport={"width": 1400, "height": 900}, bypass_csp=True
        )  # to wait inside the page
        page = context.new_page()
        tools = context.new_cdp_session(page)
        tools.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(url + place, wait_until="commit")
        seconds = until(page, condition)
        metrics = {one["name"]: one["value"] for one in tools.send("Performance.getMetrics")["metrics"]}
        spent = sum(psutil.Process(pid).cpu_times()[:2])
        context.close()
    return seconds, metrics["TaskDuration"], spent - started_cpu()


@functools.cache
def started_cpu() -> float:
    """Processor seconds of a server that does nothing but start: interpreter and imports."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "executions").mkdir()
        with served(Path(folder)) as (_, pid):
            return float(sum(psutil.Process(pid).cpu_times()[:2]))


def interactions(browser: Any, run: Path, repeat: int) -> dict[str, float]:
    """Times on the large execution once it is open."""
    with served(run) as (url, _):
        page = browser.new_page(viewport={"width": 1400, "height": 900}, bypass_csp=True)
        page.goto(f"{url}#/x/{LARGE}")
        until(page, "document.body.dataset.drawn > 0")
        boxes = page.evaluate(
            "state.graph.nodes.filter((n) => n.nodes > 1).sort((a, b) => b.tokens - a.tokens).map((n) => n.id)"
        )
        expand = [_timed(page, f"toggle({json.dumps(box)})") for box in boxes[:repeat]]
        click = [_timed(page, f"showBox({json.dumps(box)})") for box in boxes[repeat : 2 * repeat]]
        search = [
            _timed(page, f"search({json.dumps('fix the offset')})", "$('search').value = 'fix the offset';")
            for _ in range(2)
        ]
        frames = [page.evaluate(FRAMES) for _ in range(repeat)]
        page.close()
    median = statistics.median
    return {
        "expand_s": median(expand), "click_s": median(click), "search_s": search[0], "search_again_s": search[1],
        "frame_ms": median(frames),
    }  # fmt: skip


def _timed(page: Any, call: str, before: str = "") -> float:
    return float(
        page.evaluate(
            f"async () => {{ {before} const begun = performance.now(); await {call};"
            " await new Promise(requestAnimationFrame); return (performance.now() - begun) / 1e3; }"
        )
    )


def prepare(folder: Path, executions: int, calls: int, tokens: int) -> tuple[Path, Path, dict[str, int]]:
    """(run with the large execution, run with many, how large they really are)."""
    large, many = folder / "large", folder / "many"
    stories = make_run(large, executions=4)
    story = long_story(LARGE, calls, tokens, engines=("cell0", "cell1"))
    story.seal(0.5)
    story.write(large)
    training_files(large, [*stories, story])
    listed = make_run(many, executions=executions)
    training_files(many, listed)
    return large, many, {"calls": calls, "tokens": story.tokens, "executions": executions}


def measure(browser: Any, folder: Path, quick: bool) -> dict[str, Any]:
    """All numbers."""
    repeat = 3 if quick else 5
    large, many, sizes = prepare(folder, *((200, 300, 100_000) if quick else (1000, 2000, 1_000_000)))
    rows = f"document.querySelectorAll('#executions tbody tr').length === {sizes['executions']}"

    def times(name: str, run: Path, place: str, condition: str) -> dict[str, Any]:
        runs = [opened(browser, run, place, condition) for _ in range(repeat)]
        seconds, page, server = ([round(value, 3) for value in column] for column in zip(*runs, strict=True))
        return {
            f"{name}_s": statistics.median(seconds), f"{name}_s_all": seconds,
            f"{name}_page_cpu_s": statistics.median(page), f"{name}_server_cpu_s": statistics.median(server),
        }  # fmt: skip

    return {
        **sizes,
        **times("open", large, f"#/x/{LARGE}", "document.body.dataset.drawn > 0"),
        **times("list", many, "", rows),
        **{name: round(value, 3) for name, value in interactions(browser, large, repeat).items()},
    }


def main() -> None:
    """Print the numbers; write them as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="write {meta, rows} here")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    begun = time.time()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"])
        row = measure(browser, Path(folder), options.quick)
        version = browser.version
        browser.close()
    print(json.dumps(row, indent=1))
    if options.json:
        meta = {
            "benchmark": "viewer", "python": platform.python_version(), "cpus": os.cpu_count(), "chromium": version,
            "load": os.getloadavg()[0], "took_s": round(time.time() - begun, 1),
        }  # fmt: skip
        options.json.write_text(json.dumps({"meta": meta, "rows": [row]}, indent=1))


if __name__ == "__main__":
    main()
