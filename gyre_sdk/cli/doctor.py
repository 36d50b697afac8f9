"""`gyre doctor`: what works on this machine, and what to install for the rest."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre_sdk.errors import GyreError

State = Literal["ok", "missing", "broken"]
_COLOURS = {"ok": "green", "missing": "yellow", "broken": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `needed` findings that are not ok make the exit code 1."""

    what: str
    state: State
    detail: str
    needed: bool = False


def doctor() -> int:
    """Check this machine. Exit code 1 when something that the demo needs is not there."""
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("part", "state", "detail"):
        table.add_column(column, overflow="fold")
    findings: list[Finding] = []
    with console.status("checking this machine"):
        for check in CHECKS:
            findings += check()
    for finding in findings:
        # Text, not markup: what a tool says may hold brackets.
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(Text(finding.what), state, Text(finding.detail))
    console.print(table)
    bad = [f.what for f in findings if f.needed and f.state != "ok"]
    console.print(
        f"[red]the demo needs: {', '.join(bad)}[/]" if bad else "[green]everything that the demo needs is here[/]"
    )
    return 1 if bad else 0


def _machine() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "broken", f"{sys.version.split()[0]} (3.11 or newer)", needed=True)
    cores = len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Finding("machine", "ok", f"{cores} cores, {pages:.0f} GiB memory, {free:.0f} GiB free here")
    if free < 3:
        yield Finding("disk", "broken", "the demo wants 3 GiB free here", needed=True)


def _package(name: str, import_name: str, extra: str, why: str, *, needed: bool = False) -> Finding:
    if find_spec(import_name) is None:
        return Finding(name, "missing", f"{why}: pip install 'gyre[{extra}]'", needed)
    try:
        return Finding(name, "ok", metadata.version(name), needed)
    except metadata.PackageNotFoundError:
        return Finding(name, "ok", "installed", needed)


def _packages() -> Iterator[Finding]:
    yield _package("torch", "torch", "backend", "training and the embedded engine", needed=True)
    yield _package("transformers", "transformers", "backend", "training and the embedded engine", needed=True)
    yield _package("megatron-core", "megatron", "megatron", "the megatron trainer")
    yield _package("sglang", "sglang", "sglang", "an SGLang server on this machine (a GPU)")
    yield _package("ray", "ray", "ray", "cells on a Ray cluster")
    yield _package("pyarrow", "pyarrow", "export", "Parquet export")
    yield _package("matplotlib", "matplotlib", "plot", "gyre plot")
    yield _mooncake()


def _mooncake() -> Finding:
    if find_spec("mooncake") is None:
        return Finding("mooncake", "missing", "weights between cells: pip install 'gyre[mooncake]'")
    libraries = Path("/usr/lib").glob("*/libibverbs.so.1")
    if not any(libraries) and not Path("/usr/lib64/libibverbs.so.1").exists():
        return Finding("mooncake", "broken", "needs libibverbs: apt-get install -y libibverbs1")
    return Finding("mooncake", "ok", "transfer engine, TCP")


def _tools() -> Iterator[Finding]:
    for tool, package in (("bwrap", "bubblewrap"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        path = shutil.which(tool)
        detail = path or f"apt-get install -y {package}"
        yield Finding(tool, "ok" if path else "missing", detail, needed=tool == "bwrap")
    for tool, why in (("node", "Claude Code, Codex, Qwen Code, Gemini CLI"), ("podman", "tasks that need an image")):
        path = shutil.which(tool)
        yield Finding(tool, "ok" if path else "missing", path or f"only for {why}")


def _sandboxes() -> Iterator[Finding]:
    from gyre_sdk.environments.sandbox import probe_backends

    try:
        probes = anyio.run(probe_backends)
    except GyreError as error:
        yield Finding("sandbox", "broken", str(error), needed=True)
        return
    usable = [probe.name for probe in probes if probe.usable]
    for probe in probes:
        yield Finding(f"sandbox {probe.name}", "ok" if probe.usable else "missing", probe.detail)
    if not set(usable) - {"process"}:
        yield Finding("sandbox", "broken", "no isolating sandbox works here; see above", needed=True)


def _harnesses() -> Iterator[Finding]:
    from gyre_sdk.harness.agents import CliAgent
    from gyre_sdk.harness.preset import load_preset, preset_names

    for name in preset_names():
        preset = load_preset(name)
        try:
            agent = CliAgent(preset)
        except GyreError:
            yield Finding(f"harness {name}", "missing", preset.install)
        else:
            yield Finding(f"harness {name}", "ok", agent.executable)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_machine, _packages, _tools, _sandboxes, _harnesses)
