"""Sandboxes: start, exec and stop of each backend, many side by side, and what kill -9 of a runner leaves.

python -m benchmarks.sandbox [--quick] --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gyre_sdk.environments.sandbox import BACKENDS, Limits, SandboxSpec, create, journal, probe, sweep
from gyre_sdk.environments.sandbox.keeper import cgroups

LIMITS = Limits(memory_mb=512, pids=128, disk_mb=256)
VICTIM = """
import asyncio, sys
from gyre_sdk.environments.sandbox import Limits, SandboxSpec, create

async def main():
    boxes = [create(SandboxSpec(limits=Limits(memory_mb=256, pids=64, disk_mb=64)), sys.argv[1]) for _ in range(4)]
    await asyncio.gather(*(box.start() for box in boxes))
    await asyncio.gather(*(box.exec("trap '' TERM; setsid sleep 98765 & (setsid sleep 98765 &); sleep 0.1") for box in boxes))
    print(" ".join(getattr(box, "name", "-") for box in boxes), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def one(backend: str, execs: int) -> tuple[float, list[float], float]:
    """Milliseconds to start, for each exec, and to stop."""
    sandbox = create(SandboxSpec(limits=LIMITS), backend)
    begun = time.perf_counter()
    await sandbox.start()
    start = time.perf_counter() - begun
    spent = []
    for _ in range(execs):
        begun = time.perf_counter()
        result = await sandbox.exec("true")
        spent.append((time.perf_counter() - begun) * 1e3)
        assert result.rc == 0
    begun = time.perf_counter()
    await sandbox.stop()
    return start * 1e3, spent, (time.perf_counter() - begun) * 1e3


async def side_by_side(backend: str, count: int) -> tuple[int, float]:
    """How many of `count` sandboxes ran a command while all were up, and the seconds for all of it."""
    sandboxes = [create(SandboxSpec(limits=LIMITS), backend) for _ in range(count)]
    begun = time.perf_counter()
    try:
        await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
        results = await asyncio.gather(*(sandbox.exec("echo up") for sandbox in sandboxes))
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return sum(result.stdout == "up\n" for result in results), time.perf_counter() - begun


def leftovers(backend: str) -> int:
    """Processes, folders, groups and mounts that are there after kill -9 of a runner with four sandboxes, and the next start's sweep."""
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, backend], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    names = victim.stdout.readline().split()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    time.sleep(0.2)
    sweep()
    left = 0
    for name in names:
        left += (journal.home() / "boxes" / name).exists()
        left += name in Path("/proc/self/mounts").read_text()
        left += sum((parent / f"{cgroups.PREFIX}{name}").exists() for parent in set(cgroups.parents().values()))
    for folder in Path("/proc").iterdir():
        try:
            left += folder.name.isdigit() and (folder / "cmdline").read_bytes() == b"sleep\x0098765\x00"
        except OSError:
            continue
    return left


async def measure(backend: str, rounds: int, execs: int, concurrent: int) -> dict[str, Any]:
    """One row."""
    await one(backend, 1)  # the first start of a process also starts the keeper
    starts, spent, stops = [], [], []
    for _ in range(rounds):
        start, each, stop = await one(backend, execs)
        starts.append(start)
        stops.append(stop)
        spent += each
    up, seconds = await side_by_side(backend, concurrent)
    return {
        "backend": backend,
        "start_ms_p50": round(statistics.median(starts), 1),
        "exec_ms_p50": round(statistics.median(spent), 1),
        "stop_ms_p50": round(statistics.median(stops), 1),
        "exec_ms_p90": round(sorted(spent)[int(len(spent) * 0.9)], 1),
        "concurrent": up,
        "concurrent_s": round(seconds, 2),
    }


def main() -> None:
    """Print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    arguments = parser.parse_args()
    rounds, execs, concurrent = (3, 5, 8) if arguments.quick else (20, 10, 32)
    rows = []
    for backend in arguments.backends.split(","):
        found = asyncio.run(probe(backend))
        if not found.usable:
            print(f"{backend:10} not here: {found.detail}")
            continue
        row = asyncio.run(measure(backend, rounds, execs, concurrent))
        if found.capabilities.kills_all:
            row["leftovers"] = leftovers(backend)
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if arguments.json:
        meta = {
            "command": "python -m benchmarks.sandbox" + (" --quick" if arguments.quick else ""),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, {platform.machine()}",
            "load": os.getloadavg()[0],
        }
        arguments.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
