"""The pictures of docs/viewer.md: a generated run, looked at with `gyre view` in headless Chromium.

python scripts/screenshots.py FOLDER
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.viewer_runs import long_story, make_run, training_files

SIZE = {"width": 1280, "height": 760}
EDGES = "0123456789ab"


@contextmanager
def served(run: Path) -> Iterator[str]:
    """`gyre view` on a run; yields the address."""
    command = [str(Path(sys.executable).with_name("gyre")), "view", str(run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().split(": ", 1)[1].strip()
        finally:
            child.terminate()


def wait(page: Any, condition: str) -> None:
    """Until an expression is true; 30 s at most."""
    end = time.monotonic() + 30
    while not page.evaluate(condition):
        if time.monotonic() > end:
            raise SystemExit(f"the page never came to: {condition}")
        page.wait_for_timeout(50)


def save(page: Any, path: Path) -> None:
    """A picture in 256 colours: a third of the bytes, and nobody sees it."""
    from PIL import Image

    page.wait_for_timeout(300)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(256, kmeans=4, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path}  {path.stat().st_size // 1024} KiB\n")


def generated(folder: Path) -> Path:
    """A run of two cells with every kind of edge in it."""
    run = folder / "20261129-parser"
    stories = make_run(run, executions=24)
    story = long_story(
        "fedcba987654", 160, 30_000, engines=("cell0", "cell1"), group="g000001", at=stories[4].records[0].at
    )
    story.seal(0.5)
    story.write(run)
    training_files(run, [*stories, story])
    return run


def shots(browser: Any, url: str, out: Path) -> None:
    """All pictures."""
    page = browser.new_page(viewport=SIZE, color_scheme="light")
    page.goto(url)
    wait(page, "document.body.dataset.listed > 0")
    save(page, out / "viewer-run.png")
    page.goto(f"{url}#/x/{EDGES}")
    wait(page, "document.body.dataset.drawn > 0")
    page.click("#taken button")
    save(page, out / "viewer-execution.png")
    page.close()
    page = browser.new_page(viewport=SIZE, color_scheme="dark")
    page.goto(f"{url}#/x/fedcba987654")
    wait(page, "document.body.dataset.drawn > 0")
    retried = page.evaluate("state.graph.edges.find((e) => e.kind === 'retries').target")
    page.goto(f"{url}#/x/fedcba987654/n/{retried}")
    wait(page, f"document.body.dataset.box === '{retried}'")
    save(page, out / "viewer-tokens.png")
    page.goto(f"{url}#/x/{EDGES}")
    wait(page, f"state.graph?.summary.id === '{EDGES}' && document.body.dataset.drawn > 0")
    changed = page.evaluate("state.graph.edges.find((e) => e.kind === 'rerenders').target")
    page.goto(f"{url}#/x/{EDGES}/n/{changed}")
    wait(page, f"document.body.dataset.box === '{changed}'")
    page.keyboard.press("d")
    wait(page, "document.querySelector('pre.diff') !== null")
    save(page, out / "viewer-diff.png")
    page.close()


def main() -> None:
    """Make them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("GYRE_CHROMIUM") or shutil.which("chromium") or "chromium"
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        with served(generated(Path(temporary))) as url:
            shots(browser, url, options.folder)
        browser.close()


if __name__ == "__main__":
    main()
