"""Chaos: kills, stalls and hangs of every kind of process while it trains. Seeded; afterwards the books must balance.

Processes: the core, satellites, the process that forks them, the service (scheduler, router, ingest). Runs until GYRE_CHAOS_EVENTS
(default 100) have happened, at most GYRE_CHAOS_SECONDS; GYRE_CHAOS_SEED is the seed.
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
SERVICE_KILLS = 4
LAST_STEPS = 2
"""Steps after the last event, undisturbed."""


def family(service: Backend) -> tuple[int, list[int]]:
    """(the process that forks cells or 0, pids of the cells: sessions below it)."""
    forkers = children_of(service.process.pid)
    return (forkers[0] if forkers else 0), cells_of(service)


def cells_of(service: Backend) -> list[int]:
    """Pids of the cells: sessions below the process that forks them. The core first: it was forked first."""
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
    """Kill, stall or hang one process after the other until `wanted` events are in the log."""
    while len(log) < wanted and time.monotonic() < deadline and service.process.poll() is None:
        await asyncio.sleep(draw.uniform(0.5, 5.0))
        forker, cells = family(service)
        target = draw.choices(["cell", "forker", "service"], [12, 1, 2])[0]
        kind = "stall" if target == "service" else draw.choice(["kill", "kill", "stall", "hang"])
        pid = {"cell": draw.choice(cells) if cells else 0, "forker": forker, "service": service.process.pid}[target]
        if not pid:
            continue
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
            elif kind == "stall":
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(draw.uniform(0.1, 2.0))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGSTOP)  # for good: someone has to notice
            log.append(f"{target} {kind}")


async def test_the_books_balance(write_config: Callable[..., Path], tmp_path: Path) -> None:
    draw, run_dir, log = random.Random(SEED), tmp_path / "run", list[str]()
    tables: dict[str, dict[str, object]] = {
        "train": {"steps": 100_000, "groups_per_step": 2},
        "cells": {
            "count": 3,
            "slots": 8,
            "hang_s": 6.0,
            "heartbeat_s": 0.5,
            "call_timeout_s": 20.0,
            "max_restarts": 10_000,
        },
        "scheduler": {"preset": "gyre", "options": {"max_staleness": 2, "in_flight_extra": 1.0}},
        "weights": {"deadline_s": 8.0},
        "router": {"kv_migration": "embedded"},
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    deadline = began + SECONDS
    runner = Runner(f"http://127.0.0.1:{port}", waits=(0.0, 0.3), seed=SEED)
    running = asyncio.create_task(runner.run())
    for kill in range(SERVICE_KILLS):
        with backend(write_config(**tables), run_dir, port=port, timeout_s=300) as service:
            await torment(service, draw, EVENTS * (kill + 1) // SERVICE_KILLS - 1, deadline, log)
            assert not running.done(), "the run ended early"
            service.process.kill()
            log.append("service kill")
    disturbed = committed(run_dir)
    tables["train"]["steps"] = disturbed + LAST_STEPS
    left = []
    with backend(write_config(**tables), run_dir, port=port, timeout_s=300) as service:
        forker, cells = family(service)
        left = [forker, *cells, service.process.pid]
        await asyncio.wait({running}, timeout=200)
        assert running.done(), "the run does not end"
    await running
    counts = {kind: log.count(kind) for kind in sorted(set(log))}
    report = {"events": len(log), **counts, "steps": disturbed + LAST_STEPS, "seconds": round(time.monotonic() - began)}
    print(json.dumps(report))
    assert runner.errors == [], "a harness saw an error"
    assert len(log) >= EVENTS, f"only {len(log)} events within {SECONDS:g} s"
    assert disturbed >= EVENTS // 20, "hardly anything was trained under torment"
    check_books(run_dir, runner, disturbed + LAST_STEPS)
    assert [pid for pid in left if Path(f"/proc/{pid}").exists()] == []


def committed(run_dir: Path) -> int:
    ledger = Ledger(run_dir / "ledger.sqlite")
    steps = len(ledger.steps())
    ledger.close()
    return steps


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
