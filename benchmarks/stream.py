"""What durable capture costs: log, stream and ingest.

    python -m benchmarks.stream [--quick] [--json FILE]

Every row runs in a process of its own, pinned to one core. A call adds half of its tokens as prompt, and
samples the other half with logprobs.

tokens_per_s     through log + HTTP stream + ingest, from the first append until the backend has acknowledged
everything as durable tokens_per_cpu_s the same over the processor time it took: what is left when neither the
disk nor other programs are waited for fsync_ms_p50     what a call waits for its intent or result to be
durable, with so many executions at once (and p99) bytes_per_token  on disk, of one log peak_mib
resident memory that the sender's process gains while a backend is gone and logs grow by `behind_mib`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette

from gyre_backend.ingest import Ingest, ingest_routes
from gyre_sdk.capture.wal import Flusher, Wal
from gyre_sdk.stream import FrameSender
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Intent, Opened, Outcome, Result, Sealed, Span

Row = dict[str, Any]
EXECUTIONS = 32


class Execution:
    """Writes one execution's records, one call after the other."""

    def __init__(self, number: int, folder: Path, flusher: Flusher, tokens: int) -> None:
        self.name = f"{number:012x}"
        self.wal = Wal.create(folder / self.name / "wal.gyre", flusher)
        self.half = tokens // 2
        self.length = 0
        self.calls = 0
        rng = np.random.default_rng(number)
        self.ids = pack_ids(rng.integers(0, 150_000, self.half))
        self.logprobs = pack_floats(-rng.random(self.half))
        self.waits: list[float] = []

    def open(self) -> None:
        self.wal.append(Opened(execution=self.name, at=time.time(), task="bench"))

    async def call(self, *, durable: bool) -> None:
        number, now = self.calls, time.time()
        self.calls += 1
        await self._put(
            Intent(call=number, at=now, dialect="chat", base_call=number - 1, base_len=self.length, delta=self.ids),
            durable,
        )
        spans = (Span(1, 0, self.half),)
        await self._put(
            Result(call=number, at=now, ids=self.ids, logprobs=self.logprobs, versions=spans, finish="stop"), durable
        )
        self.wal.append(Delivered(call=number, at=now, complete=True))
        self.length += 2 * self.half

    async def _put(self, record: Intent | Result, durable: bool) -> None:
        started = time.perf_counter()
        seq = self.wal.append(record)
        if durable:
            await self.wal.durable(seq)
            self.waits.append(time.perf_counter() - started)

    async def close(self) -> None:
        self.wal.append(Sealed(at=time.time(), outcome=Outcome(status="completed", reward=0.0, valid=True)))
        await self.wal.close()


async def throughput(tokens_per_call: int, total: int) -> Row:
    """Many executions as fast as they can, over real HTTP on loopback, all in one process on one core."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GYRE_BENCH_DIR")) as name:
        folder = Path(name)
        ingest = Ingest(folder / "ingest", on_sealed=lambda graph: ingest.forget(graph.execution))
        app = Starlette(routes=ingest_routes(ingest, authorize=lambda request: None))
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        calls = total // tokens_per_call // EXECUTIONS
        with Flusher(folder / "journal.gyre") as flusher:
            async with FrameSender(url, "x", client=httpx.AsyncClient(trust_env=False, timeout=60)) as sender:
                executions = [Execution(i, folder, flusher, tokens_per_call) for i in range(EXECUTIONS)]
                started, spent = time.perf_counter(), time.process_time()
                await asyncio.gather(*(_run(e, sender, calls) for e in executions))
                assert await sender.drain(120)
                seconds = time.perf_counter() - started
                spent = time.process_time() - spent
        server.should_exit = True
        await serving
        tokens = sum(e.calls * 2 * e.half for e in executions)
        size = sum(e.wal.path.stat().st_size for e in executions)
        assert ingest.stats.sealed == EXECUTIONS
        return {
            "case": "throughput",
            "tokens_per_call": tokens_per_call,
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds),
            "tokens_per_cpu_s": round(tokens / spent),
            "bytes_per_token": round(size / tokens, 2),
        }


async def _run(execution: Execution, sender: FrameSender, calls: int) -> None:
    sender.opened(execution.name, execution.wal.path)
    execution.wal.listen(lambda seq, offset: sender.advanced(execution.name, seq, offset))
    execution.open()
    for _ in range(calls):
        await execution.call(durable=True)
    await execution.close()


async def latency(executions: int, seconds: float) -> Row:
    """So many executions, each with a call of 600 tokens about every 200 ms."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GYRE_BENCH_DIR")) as name:
        folder = Path(name)
        probe = _probe(folder)
        with Flusher(folder / "journal.gyre") as flusher:
            running = [Execution(i, folder, flusher, 600) for i in range(executions)]
            rng = np.random.default_rng(0)
            until = time.perf_counter() + seconds

            async def one(execution: Execution) -> None:
                execution.open()
                while time.perf_counter() < until:
                    await asyncio.sleep(rng.exponential(0.2))
                    await execution.call(durable=True)
                await execution.close()

            await asyncio.gather(*map(one, running))
            waits = np.sort([wait for e in running for wait in e.waits]) * 1e3
            stats = flusher.stats
        return {
            "case": "latency",
            "executions": executions,
            "fsync_ms_p50": round(float(np.percentile(waits, 50)), 3),
            "fsync_ms_p99": round(float(np.percentile(waits, 99)), 3),
            "disk_sync_ms": round(probe, 3),
            "records_per_sync": round(stats.records / max(1, stats.syncs), 2),
        }


def _probe(folder: Path) -> float:
    """Median milliseconds of one plain sync of 2 kB."""
    times = []
    with (folder / "probe").open("wb") as file:
        for _ in range(30):
            started = time.perf_counter()
            file.write(b"x" * 2000)
            file.flush()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e3


async def gone(seconds: float) -> Row:
    """Nobody listens: 16 executions write on, the sender keeps trying."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GYRE_BENCH_DIR")) as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with Flusher(folder / "journal.gyre") as flusher:
            async with FrameSender(url, "x") as sender:
                executions = [Execution(i, folder, flusher, 8192) for i in range(16)]
                for execution in executions:
                    sender.opened(execution.name, execution.wal.path)
                    execution.wal.listen(
                        lambda seq, offset, name=execution.name: sender.advanced(name, seq, offset)  # type: ignore[misc]
                    )
                    execution.open()
                    await execution.call(durable=True)
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                until = time.perf_counter() + seconds
                while time.perf_counter() < until:
                    await asyncio.gather(*(execution.call(durable=True) for execution in executions))
                    await asyncio.sleep(0.05)
                after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                behind = sender.status().behind_bytes
            for execution in executions:
                await execution.close()
        return {
            "case": "gone",
            "seconds": seconds,
            "peak_mib": round((after - before) / 1024, 1),
            "behind_mib": round(behind / 2**20, 1),
        }


def _pinned(make: Callable[[], Any], queue: multiprocessing.Queue[Row]) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    queue.put(asyncio.run(make()))


def run_row(make: Callable[[], Any]) -> Row:
    """Run in a process of its own on one core."""
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[Row] = context.Queue()
    process = context.Process(target=_pinned, args=(make, queue), daemon=True)
    process.start()
    row = queue.get(timeout=300)
    process.join()
    return row


def main() -> None:
    """Print the table; write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--json", type=Path, help="write {meta, rows} here")
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    rows = []
    for tokens in (640, 4096, 32768):
        rows.append(run_row(lambda tokens=tokens: throughput(tokens, int(40e6 * scale * min(1, tokens / 4096)))))  # type: ignore[misc]
        print(rows[-1], flush=True)
    for executions in (1, 16, 64):
        rows.append(run_row(lambda executions=executions: latency(executions, 20 * scale)))  # type: ignore[misc]
        print(rows[-1], flush=True)
    rows.append(run_row(lambda: gone(60 * scale)))
    print(rows[-1], flush=True)
    if options.json:
        meta = {
            "benchmark": "stream",
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "quick": options.quick,
        }
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
