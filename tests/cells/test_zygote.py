"""The process that forks cells, killed, stopped and asked at bad moments: every cell's end is known, to the one who started it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre_backend.cells.runtime import local, zygote
from gyre_backend.cells.runtime.local import LocalRuntime
from gyre_backend.cells.runtime.zygote import Zygote
from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_backend.errors import CellError

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="forks and parent-death signals")]

SCRIPT = """
import ctypes, json, signal, sys, time, types
import gyre_backend.cells.runtime.zygote as zygote
def work():
    line = sys.stdin.readline()
    if not line:
        sys.exit(7)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    name = json.loads(line)["name"]
    if name.startswith("dies"):
        sys.exit(3)
    ready = dict(ready=True, url=name, engine_url="", pid=0, version=0, context=0, estimator="", weighting="", whole_replies=False)
    print(json.dumps(ready), flush=True)
    time.sleep(600)
sys.modules["gyre_backend.cells.worker"] = types.SimpleNamespace(main=work)
zygote._preload = lambda folder: None
zygote.main()
"""


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalRuntime]:
    monkeypatch.setattr(Zygote, "command", (sys.executable, "-c", SCRIPT))
    for module in (zygote, local):
        monkeypatch.setattr(module, "ANSWER_S", 1.0)
    made = LocalRuntime(tmp_path / "cells", preload=True)
    yield made
    await made.aclose()


def spec(name: str) -> CellSpec:
    return CellSpec(name=name, index=0, model_dir="m", config={}, run_dir="r", token="t")


async def start(runtime: LocalRuntime, name: str) -> local.LocalCell:
    cell = await runtime.start(spec(name), 20.0)
    assert cell.ready == CellReady(
        ready=True,
        url=name,
        engine_url="",
        pid=0,
        version=0,
        context=0,
        estimator="",
        weighting="",
        whole_replies=False,
    ), "another cell's answer"
    return cell


def forker(runtime: LocalRuntime) -> int:
    assert runtime._zygote is not None
    assert runtime._zygote.pid is not None
    return runtime._zygote.pid


async def test_cells_that_die_at_once_are_told_apart(runtime: LocalRuntime) -> None:
    names = [f"dies{number}" if number % 2 else f"lives{number}" for number in range(12)]
    found = await asyncio.gather(*(start(runtime, name) for name in names), return_exceptions=True)
    for name, cell in zip(names, found, strict=True):
        assert isinstance(cell, CellError if name.startswith("dies") else local.LocalCell), (name, cell)


async def test_the_forker_is_killed(runtime: LocalRuntime) -> None:
    cells = [await start(runtime, f"cell{number}") for number in range(2)]
    os.kill(forker(runtime), signal.SIGKILL)
    for cell in cells:
        assert "SIGKILL" in await asyncio.wait_for(cell.wait(), 10)
        await asyncio.wait_for(cell.kill(), 10)
    await start(runtime, "cell2")


async def test_the_forker_is_stopped_while_a_cell_starts(runtime: LocalRuntime) -> None:
    """The start fails within its bound, other cells of that forker end, and the next one comes up as itself."""
    other = await start(runtime, "cell0")
    os.kill(forker(runtime), signal.SIGSTOP)
    with pytest.raises(CellError):
        await asyncio.wait_for(start(runtime, "cell1"), 15)
    await asyncio.wait_for(other.wait(), 10)
    await start(runtime, "cell2")


async def test_the_forker_is_stopped_while_a_cell_is_killed(runtime: LocalRuntime) -> None:
    cell = await start(runtime, "cell0")
    os.kill(forker(runtime), signal.SIGSTOP)
    await asyncio.wait_for(cell.kill(), 15)
    await start(runtime, "cell1")


async def test_a_start_that_was_given_up_takes_nobodys_answer(runtime: LocalRuntime) -> None:
    await start(runtime, "cell0")
    pid = forker(runtime)
    os.kill(pid, signal.SIGSTOP)
    given_up = [asyncio.create_task(start(runtime, f"lost{number}")) for number in range(3)]
    await asyncio.sleep(0.1)
    for task in given_up:
        task.cancel()
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*given_up, return_exceptions=True)
    for number in range(3):
        await start(runtime, f"next{number}")
