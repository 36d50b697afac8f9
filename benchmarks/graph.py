"""What a branch graph costs: fold, look-ups, memory.

    python -m benchmarks.graph [--quick] [--json FILE]

One execution of `calls` turns, each adding half of its tokens as prompt and sampling the other half.

encode_us, decode_us, fold_us   processor time per call of writing, reading and folding its three records
resolve_us_early, resolve_us_late   looking up a turn's prompt with its base, at turn 10 and at the last
bytes_per_unique_token          memory the graph holds (tracemalloc), over its unique tokens
leaves_ms, networkx_ms, digest_ms   of the whole graph
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import decode, encode, pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Intent, Opened, Record, Result, Span


def records(calls: int, half: int) -> list[Record]:
    """A linear execution."""
    rng = np.random.default_rng(0)
    made: list[Record] = [Opened(execution="e", at=0.0)]
    length = 0
    for call in range(calls):
        ids = pack_ids(rng.integers(0, 150_000, half))
        made.append(Intent(call=call, at=1.0, dialect="chat", base_call=call - 1, base_len=length, delta=ids))
        sampled, logprobs = pack_ids(rng.integers(0, 150_000, half)), pack_floats(-rng.random(half))
        spans = (Span(1, 0, half),)
        made.append(Result(call=call, at=2.0, ids=sampled, logprobs=logprobs, versions=spans, finish="stop"))
        made.append(Delivered(call=call, at=3.0, complete=True))
        length += 2 * half
    return made


def spent(work: Callable[[], Any], repeat: int = 3) -> float:
    """Least processor time of some runs, in seconds."""
    best = float("inf")
    for _ in range(repeat):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def row(calls: int, tokens: int) -> dict[str, Any]:
    """One size."""
    half = tokens // 2
    made = records(calls, half)
    frames = [encode(record, seq) for seq, record in enumerate(made)]
    graph = BranchGraph.replay(made)
    news = np.arange(half, dtype=np.int32) + 200_000

    def look(call: int) -> float:
        length = graph.call_length(call)
        times = 2000
        return spent(lambda: [graph.resolve(news, base_call=call, base_len=length) for _ in range(times)]) / times

    result = {
        "calls": calls,
        "tokens_per_call": tokens,
        "encode_us": spent(lambda: [encode(record, 0) for record in made]) / calls * 1e6,
        "decode_us": spent(lambda: [decode(frame) for frame in frames]) / calls * 1e6,
        "fold_us": spent(lambda: BranchGraph.replay(made)) / calls * 1e6,
        "resolve_us_early": look(10) * 1e6,
        "resolve_us_late": look(calls - 1) * 1e6,
        "leaves_ms": spent(graph.leaves) * 1e3,
        "networkx_ms": spent(graph.to_networkx) * 1e3,
        "digest_ms": spent(graph.digest) * 1e3,
    }
    made = []
    del graph
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    graph = BranchGraph.replay(decode(frame)[1] for frame in frames)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    result["bytes_per_unique_token"] = held / graph.unique_tokens
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}


def main() -> None:
    """Print the table; write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="write {meta, rows} here")
    options = parser.parse_args()
    sizes = [(50, 640)] if options.quick else [(50, 640), (2000, 512), (2000, 60)]
    rows = []
    for calls, tokens in sizes:
        rows.append(row(calls, tokens))
        print(rows[-1], flush=True)
    if options.json:
        meta = {"benchmark": "graph", "python": platform.python_version(), "cpus": os.cpu_count()}
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
