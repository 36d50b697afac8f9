"""Builds the documentation into site/: docs/, a page per harness preset and example, and the reference from docstrings.

Strict: a warning of the site generator ends the build, and so does an internal link, anchor or picture that leads nowhere.
Run by `make docs`, with the environment of constraints-docs.txt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"
SITE = ROOT / "site"

REFERENCE: dict[str, tuple[str, list[str]]] = {
    "sdk": (
        "The SDK: gateway, sessions, sampling",
        [
            "gyre_sdk.sessions", "gyre_sdk.capture.gateway", "gyre_sdk.capture.config", "gyre_sdk.capture.renderer",
            "gyre_sdk.sampling.types", "gyre_sdk.sampling.sglang", "gyre_sdk.stream.sender", "gyre_sdk.errors",
        ],
    ),
    "graph": (
        "Records and the branch graph",
        [
            "gyre_sdk.wire.records", "gyre_sdk.wire.files", "gyre_sdk.wire.codec", "gyre_sdk.graph.branch_graph",
            "gyre_sdk.graph.state", "gyre_sdk.graph.nodes", "gyre_sdk.graph.views", "gyre_sdk.graph.edges", "gyre_sdk.graph.loading",
        ],
    ),
    "environments": (
        "Tasks, sandboxes, harnesses",
        [
            "gyre_sdk.environments.task", "gyre_sdk.environments.load", "gyre_sdk.environments.grading", "gyre_sdk.environments.steps",
            "gyre_sdk.environments.sandbox.base", "gyre_sdk.environments.sandbox.choose", "gyre_sdk.harness.preset",
            "gyre_sdk.harness.records", "gyre_sdk.harness.config",
        ],
    ),
    "exporters": (
        "Exports and imports",
        [
            "gyre_sdk.exporters.registry", "gyre_sdk.exporters.structure", "gyre_sdk.exporters.atif",
            "gyre_sdk.exporters.atif_import", "gyre_sdk.exporters.parquet", "gyre_sdk.exporters.samples", "gyre_sdk.exporters.otel",
        ],
    ),
    "training": (
        "Training",
        [
            "gyre_backend.config.tables", "gyre_backend.select.paths", "gyre_backend.select.selection", "gyre_backend.select.advantages",
            "gyre_backend.tree.plan", "gyre_backend.tree.split", "gyre_backend.tree.attend", "gyre_backend.algorithms.batch",
            "gyre_backend.algorithms.common", "gyre_backend.trainers.base", "gyre_backend.monitors.base", "gyre_backend.errors",
        ],
    ),
    "cells": (
        "Cells, scheduler, router, weights",
        [
            "gyre_backend.cells.policy", "gyre_backend.cells.policy_config", "gyre_backend.cells.state", "gyre_backend.cells.lease",
            "gyre_backend.router.router", "gyre_backend.weights.manifest", "gyre_backend.weights.transport",
            "gyre_backend.ledger.store", "gyre_backend.ingest.ingest",
        ],
    ),
}  # fmt: skip
"""Page -> title and the modules whose docstrings make it."""

COMMANDS = (
    "run",
    "train",
    "graph",
    "view",
    "top",
    "plot",
    "export",
    "importing",
    "runs",
    "wal",
    "doctor",
    "verify_template",
)


def prepare() -> None:
    """docs/ copied to build/docs, with what is made here."""
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "docs", BUILD)
    harnesses()
    reference()


def harnesses() -> None:
    """A page per preset and per example folder that has a README, and the lists of them."""
    folder = BUILD / "how-to"
    presets = []
    for path in sorted((ROOT / "gyre_sdk/harness/presets").glob("*.toml")):
        text = path.read_text()
        about = "\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        facts = tomllib.loads(text)
        page = [
            f"# {facts['name']}", "", about, "",
            "    " + facts.get("install", "comes with Gyre").replace("\n", " "),
            f"    gyre run -t TASKS -a {facts['name']} -m MODEL", "",
            f"Dialect: `{facts['dialect']}`. The preset, which a file of your own may change:", "", "```toml", text.rstrip(), "```", "",
        ]  # fmt: skip
        (folder / f"{path.stem}.md").write_text("\n".join(page))
        presets.append(f"- [{facts['name']}]({path.stem}.md): {facts['dialect']}")
    examples = []
    for readme in sorted((ROOT / "harness_examples").glob("*/README.md")):
        name = f"example-{readme.parent.name}"
        (folder / f"{name}.md").write_text(_moved(readme, folder / name))
        title = next(
            (line[2:] for line in readme.read_text().splitlines() if line.startswith("# ")), readme.parent.name
        )
        examples.append(f"- [{title}]({name}.md)")
    index = folder / "index.md"
    text = index.read_text().replace("PRESETS", "\n".join(presets))
    index.write_text(
        text.replace(
            "EXAMPLES", "\n".join(examples) or "`harness_examples/` in the repository holds programs to start from."
        )
    )


def _moved(readme: Path, files: Path) -> str:
    """An example's README for the site: links to presets and documentation lead to their pages, other files come along."""

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[1].partition("#")
        path = (readme.parent / target).resolve()
        end = f"#{anchor}" if anchor else ""
        if not target or "://" in found[1] or not path.is_file():
            return found[0]
        if path.parent.name == "presets" and path.suffix == ".toml":
            return f"]({path.stem}.md)"
        if path.is_relative_to(ROOT / "docs"):
            return f"](../{path.relative_to(ROOT / 'docs')}{end})"
        if path.name == "README.md" and path.parent.parent == readme.parent.parent:
            return f"](example-{path.parent.name}.md{end})"
        files.mkdir(exist_ok=True)
        shutil.copy(path, files / path.name)
        return f"]({files.name}/{path.name})"

    return re.sub(r"\]\(([^)\s]+)\)", link, readme.read_text())


def reference() -> None:
    """Pages of mkdocstrings directives."""
    folder = BUILD / "reference"
    folder.mkdir(exist_ok=True)
    lines = [
        "# Reference",
        "",
        "Made from docstrings. `gyre COMMAND --help` says the same of commands in the terminal.",
        "",
    ]
    for name, (title, modules) in REFERENCE.items():
        body = "".join(f"\n## {module}\n\n::: {module}\n    options:\n      heading_level: 3\n" for module in modules)
        (folder / f"{name}.md").write_text(f"# {title}\n{body}")
        lines.append(f"- [{title}]({name}.md)")
    body = "".join(
        f"\n::: gyre_sdk.cli.{module}\n    options:\n      docstring_style: numpy\n      heading_level: 2\n"
        for module in COMMANDS
    )
    (folder / "commands.md").write_text(f"# Commands\n{body}")
    lines.append("- [Commands](commands.md)")
    (folder / "index.md").write_text("\n".join(lines) + "\n")


class _Page(HTMLParser):
    """Links, pictures and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if facts.get("id"):
            self.anchors.add(str(facts["id"]))
        for name in ("href", "src"):
            if facts.get(name) and tag in ("a", "img", "link", "script"):
                self.links.append(str(facts[name]))


def broken_links(site: Path) -> Iterator[str]:
    """`page: link` for every internal link that leads nowhere. External ones are not fetched."""
    pages: dict[str, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages["/" + path.relative_to(site).as_posix()] = page
    for name, page in pages.items():
        if name == "/404.html":
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            target = unquote(urlsplit(urljoin(name, link)).path)
            if target.endswith("/"):
                target += "index.html"
            if not (site / target.lstrip("/")).is_file():
                yield f"{name}: {link}"
            elif parts.fragment and target in pages and not _has(pages[target], unquote(parts.fragment)):
                yield f"{name}: {link} (no such anchor)"


def _has(page: _Page, anchor: str) -> bool:
    return anchor in page.anchors or anchor.startswith(("__", ":~:"))


def main() -> int:
    """Prepare, build, check."""
    prepare()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [
        str(Path(sys.executable).with_name("zensical")),
        "build",
        "--strict",
        "--clean",
        "-f",
        str(ROOT / "zensical.toml"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0 or not (SITE / "index.html").is_file():
        sys.stderr.write(f"{said}\nthe site could not be built\n")
        return 1
    broken = list(broken_links(SITE))
    for line in broken[:50]:
        sys.stderr.write(f"broken link: {line}\n")
    pages = len(list(SITE.rglob("*.html")))
    undocumented = [
        page for page in REFERENCE if "doc-module" not in (SITE / "reference" / page / "index.html").read_text()
    ]
    for page in undocumented:
        sys.stderr.write(f"reference/{page}: nothing was made from docstrings\n")
    sys.stdout.write(f"{SITE}: {pages} pages, {len(broken)} broken links\n")
    return 1 if broken or undocumented else 0


if __name__ == "__main__":
    sys.exit(main())
