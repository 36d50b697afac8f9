"""What the gateway adds to a call: closed-loop clients in processes of their own against an instant engine.

    python -m benchmarks.gateway [--quick] [--json FILE] [--think S] [--dir DIR]

Each client is one execution: 50 turns growing to about 32k tokens, chat completions, not streamed, ChatML. A turn is a
reply of about 60 tokens and a tool result of about 600. Between turns a client waits `think` seconds, as a harness does
while its tool and its model run; with `--think 0` the clients saturate the gateway, and a call waits for the others.

overhead_ms_*      client's send to client's receipt of a whole reply; the engine answers at once, so all of it is ours
calls_per_s        over the whole row
cpu_ms_per_call    CPU time of the gateway's process, all threads: what other load on the machine does not change much
late_over_early    median overhead of turns 46-50 over that of turns 4-8
bytes_per_unique_token   resident memory added by the executions, over unique tokens in their graphs, once free memory was given
                         back to the system (the gateway does so every 30 s); bytes_before is the same before that
fsync_ms_p50       what the disk takes for one sync of 2 kB, measured next to it: each call needs two
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gyre_sdk.capture.gateway import ExecutionSpec, Gateway
from gyre_sdk.capture.memory import give_back
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.sampling import Completion, GenerateRequest, ModelInfo
from gyre_sdk.testing import tiny_model_dir
from gyre_sdk.wire.records import Outcome, Span

TURNS = 50
RESULT_CHARS = 1580
"""Of a tool result; about 600 tokens of the tiny tokenizer."""


class InstantEngine:
    """Answers every call at once with the same 60 tokens."""

    def __init__(self, ids: list[int], vocab_size: int) -> None:
        self._ids = np.asarray(ids, np.int32)
        self._logprobs = np.full(len(ids), -0.5, np.float32)
        self._vocab_size = vocab_size

    async def generate(self, request: GenerateRequest) -> Any:
        yield Completion(
            finish="stop",
            output_ids=self._ids,
            logprobs=self._logprobs,
            versions=(Span(1, 0, len(self._ids)),),
            prompt_tokens=len(request.input_ids),
            engine="instant",
        )

    async def abort(self, rid: str) -> None:
        return None

    async def model_info(self) -> ModelInfo:
        return ModelInfo(model="instant", vocab_size=self._vocab_size, context_length=2**20, weight_version=1)


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bytes:
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    headers = await reader.readuntil(b"\r\n\r\n")
    if not headers.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(headers.decode(errors="replace"))
    length = next(
        int(line.split(b":")[1]) for line in headers.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return await reader.readexactly(length)


async def _client(port: int, token: str, turns: int, think: float, offset: float) -> list[float]:
    """One execution's harness; returns the seconds of each call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n".encode()
    messages = [json.dumps({"role": "system", "content": "You are an agent. " * 30})]
    messages.append(json.dumps({"role": "user", "content": "Fix the bug and run the tests."}))
    seconds: list[float] = []
    await asyncio.sleep(offset)
    for turn in range(turns):
        body = ('{"model":"m","messages":[' + ",".join(messages) + "]}").encode()
        started = time.perf_counter()
        reply = await _post(reader, writer, head, body)
        seconds.append(time.perf_counter() - started)
        messages.append(json.dumps(json.loads(reply)["choices"][0]["message"]))
        line = f"turn {turn}: the file was created and the tests pass. "
        messages.append(json.dumps({"role": "user", "content": (line * 40)[:RESULT_CHARS]}))
        if think:
            await asyncio.sleep(think)
    writer.close()
    return seconds


def _clients(port: int, tokens: list[str], turns: int, think: float, results: Any) -> None:
    async def all_of_them() -> list[list[float]]:
        step = think / max(1, len(tokens))
        jobs = (_client(port, token, turns, think, step * number) for number, token in enumerate(tokens))
        return await asyncio.gather(*jobs)

    results.put(asyncio.run(all_of_them()))


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _row(concurrency: int, turns: int, think: float, folder: Path) -> dict[str, Any]:
    renderer = load_renderer(tiny_model_dir(folder / "model"))
    reply = renderer.encode("I look at the file and run the tests, then I write the fix and print the result of it.")
    engine = InstantEngine([*reply, renderer.stop_ids[0]], renderer.vocab_size)
    gateway = Gateway(engine, renderer, folder / "run")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    async with gateway.serving() as url:
        handles = [await gateway.open(ExecutionSpec()) for _ in range(concurrency)]
        before = _resident()
        started, cpu = time.perf_counter(), time.process_time()
        port, tokens = int(url.rpartition(":")[2]), [handle.token for handle in handles]
        process = context.Process(target=_clients, args=(port, tokens, turns, think, results), daemon=True)
        process.start()
        seconds = await asyncio.to_thread(results.get)
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        await asyncio.to_thread(process.join)
        held = _resident() - before
        give_back()
        added = _resident() - before
        unique = sum(handle.graph.unique_tokens for handle in handles)
        context_tokens = handles[0].graph.call_length(turns - 1)
        for handle in handles:
            await gateway.seal(handle.execution, Outcome(status="completed"))
    overhead = sorted(value * 1e3 for client in seconds for value in client)
    early = statistics.median(value for client in seconds for value in client[3:8])
    late = statistics.median(value for client in seconds for value in client[-5:])
    return {
        "concurrency": concurrency,
        "think_s": think,
        "turns": turns,
        "context_tokens": context_tokens,
        "overhead_ms_p50": round(statistics.median(overhead), 2),
        "overhead_ms_p99": round(overhead[min(len(overhead) - 1, int(0.99 * len(overhead)))], 2),
        "calls_per_s": round(len(overhead) / elapsed, 1),
        "cpu_ms_per_call": round(cpu * 1e3 / len(overhead), 2),
        "late_over_early": round(late / early, 2),
        "bytes_per_unique_token": round(added / unique, 1),
        "bytes_before": round(held / unique, 1),
        "unique_tokens": unique,
        "fsync_ms_p50": round(_fsync_ms(folder), 2),
    }


def _fsync_ms(folder: Path) -> float:
    """Median milliseconds of a sync of 2 kB on the disk that holds the logs."""
    file = os.open(folder / "probe", os.O_CREAT | os.O_RDWR)
    times: list[float] = []
    for number in range(25):
        os.pwrite(file, b"x" * 2048, 2048 * number)
        started = time.perf_counter()
        os.fdatasync(file)
        times.append(time.perf_counter() - started)
    os.close(file)
    return statistics.median(times) * 1e3


COLUMNS: tuple[str, ...] = (
    "concurrency",
    "think_s",
    "overhead_ms_p50",
    "overhead_ms_p99",
    "calls_per_s",
    "cpu_ms_per_call",
)
COLUMNS += ("late_over_early", "bytes_per_unique_token", "bytes_before", "fsync_ms_p50")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 executions only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--think", type=float, help="seconds between a client's calls; default 1, and a row with 0")
    parser.add_argument("--dir", type=Path, help="where the logs go; default a temporary folder")
    arguments = parser.parse_args()
    thinks = [1.0] if arguments.think is None else [arguments.think]
    plan = [(concurrency, think) for think in thinks for concurrency in ([16] if arguments.quick else [1, 16, 64])]
    if arguments.think is None and not arguments.quick:
        plan.append((16, 0.0))
    rows: list[dict[str, Any]] = []
    print("  ".join(f"{name:>22}" for name in COLUMNS))
    for concurrency, think in plan:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            row = asyncio.run(_row(concurrency, 20 if arguments.quick else TURNS, think, Path(folder)))
        rows.append(row)
        print("  ".join(f"{row[name]:>22}" for name in COLUMNS), flush=True)
    if arguments.json is not None:
        meta = {
            "benchmark": "gateway",
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
        arguments.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
