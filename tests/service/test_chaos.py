"""Chaos: kills and stalls of every kind of process while it trains. Seeded; afterwards the books must
balance.

GYRE_CHAOS_EVENTS sets how many (default 100), GYRE_CHAOS_SECONDS the most seconds, GYRE_CHAOS_SEED the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gyre_backend.ledger import Ledger
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import WalReader
from tests.service.runner import TOKEN, Backend, Runner, backend

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(900)]

EVENTS = int(os.environ.get("GYRE_CHAOS_EVENTS", "100"))
SECONDS = float(os.environ.get("GYRE_CHAOS_SECONDS", "600"))
SEED = int(os.environ.get("GYRE_CHAOS_SEED", "0"))
SERVICE_KILLS = 3


def cells_of(service: Backend) -> list[int]:
    """Pids of the cells: sessions below the process that forks them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            pid, parent, session = int(path.parent.name), int(fields[1]), int(fields[3])
            if pid == session and parent in children_of(service.process.pid):
                found.append(pid)
    return found


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


async def torment(service: Backend, draw: random.Random, wanted: int, deadline: float, log: list[str]) -> None:
    """Kill or stall one cell after the other."""
    while len(log) < wanted and time.monotonic() < deadline and service.process.poll() is None:
        await asyncio.sleep(draw.uniform(0.2, 3.0))
        pids = cells_of(service)
        if not pids:
            continue
        pid = draw.choice(pids)
        kind = draw.choice(["kill", "kill", "stall", "hang"])
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
            elif kind == "stall":
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(draw.uniform(0.1, 2.0))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGSTOP)  # for good: the service has to notice
            log.append(kind)


async def test_the_books_balance(write_config: Callable[..., Path], tmp_path: Path) -> None:
    draw, run_dir, log = random.Random(SEED), tmp_path / "run", list[str]()
    steps = max(4, EVENTS // 4)
    config = write_config(
        train={"steps": steps, "groups_per_step": 2},
        cells={
            "count": 3,
            "slots": 8,
            "hang_s": 6.0,
            "heartbeat_s": 0.5,
            "call_timeout_s": 20.0,
            "max_restarts": 10_000,
        },
        scheduler={"preset": "gyre", "options": {"max_staleness": 2, "in_flight_extra": 1.0}},
        weights={"deadline_s": 8.0},
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deadline = time.monotonic() + SECONDS
    runner = Runner(f"http://127.0.0.1:{port}", waits=(0.0, 0.3), seed=SEED)
    running = asyncio.create_task(runner.run())
    kills = 0
    while not running.done() and time.monotonic() < deadline + 200:
        with backend(config, run_dir, port=port, timeout_s=300) as service:
            share = EVENTS * (kills + 1) // (SERVICE_KILLS + 1)
            tormenting = asyncio.create_task(torment(service, draw, share, deadline, log))
            await asyncio.wait({tormenting, running}, return_when=asyncio.FIRST_COMPLETED)
            await tormenting
            if kills < SERVICE_KILLS and not running.done():
                service.process.kill()
                log.append("service killed")
                kills += 1
            else:
                await asyncio.wait({running}, timeout=max(1.0, deadline + 200 - time.monotonic()))
    await running
    assert runner.errors == [], "a harness saw an error"
    check_books(run_dir, runner, steps)
    print(json.dumps({"events": {kind: log.count(kind) for kind in sorted(set(log))}, "steps": steps}))


def check_books(run_dir: Path, runner: Runner, steps: int) -> None:
    """Versions without gaps, every group trained at most once, every served token recorded."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.versions() == list(range(1, steps + 1))
    trained = ledger.groups("trained")
    by_step: dict[int, int] = {}
    for group in trained:
        assert group.step is not None
        by_step[group.step] = by_step.get(group.step, 0) + 1
    assert by_step == dict.fromkeys(range(steps), 2)
    sealed = {e for g in ledger.groups() for e, outcome in ledger.outcomes(g.id).items() if outcome is not None}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == list(range(1, steps + 1))
    checked = 0
    for execution in sealed:
        graph = BranchGraph.replay(
            frame.record() for frame in WalReader(run_dir / "frames" / f"{execution}.gyre").frames()
        )
        for number, call in graph.calls.items():
            if call.done:
                assert call.output_ids.tolist() == runner.served[execution, number]
                checked += 1
    assert checked >= len(trained) * 4 * runner.calls
    ledger.close()


async def test_nothing_is_left_behind(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9 of the service: its cells, and the process that forks them, are gone within seconds."""
    with backend(write_config(cells={"count": 2}), tmp_path / "run", timeout_s=300) as service:
        cells = cells_of(service)
        others = children_of(service.process.pid)
        assert len(cells) == 2
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
            answer = await http.get("/v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
            assert [cell["role"] for cell in answer.json()["cells"]] == ["rollout", "rollout"]
        service.process.kill()
        for _ in range(150):
            if not any(Path(f"/proc/{pid}").exists() for pid in [*cells, *others]):
                break
            await asyncio.sleep(0.1)
        left = [pid for pid in [*cells, *others] if Path(f"/proc/{pid}").exists()]
        assert left == []
