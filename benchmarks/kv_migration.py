"""What moving a call's keys and values costs, against computing the prefix again at the target.

    python -m benchmarks.kv_migration [--quick] [--model smollm2] [--json FILE]

Two embedded engines with the same weights. Per transport and prompt length, in turns: the source computes the prompt; the target then
answers one token after a migration (pin, pull, acknowledge, release; `move_ms`, and `after_ms` for the call itself), or without one
(`prefill_ms`). `ratio` is prefill_ms / (move_ms + after_ms), medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from gyre_backend.engines.embedded import EmbeddedEngine, load_model
from gyre_backend.models import model_dir
from gyre_backend.router.migrate import EmbeddedMigrator
from gyre_backend.weights import make_transport
from tests.router.conftest import serve


async def ask(http: httpx.AsyncClient, url: str, ids: list[int]) -> float:
    """Seconds of a one-token call."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0.0}}
    began = time.perf_counter()
    (await http.post(f"{url}/generate", json=body)).raise_for_status()
    return time.perf_counter() - began


async def measure(folder: Path, by: str, lengths: list[int], rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """Rows of one transport."""
    sides = ("source", "target")
    transports = [None if by == "http" else make_transport(by, folder=scratch / by / side) for side in sides]
    engines = [EmbeddedEngine(load_model(folder), transport=transport) for transport in transports]
    rows = []
    try:
        async with (
            serve(engines[0].app()) as source,
            serve(engines[1].app()) as target,
            httpx.AsyncClient(timeout=600, trust_env=False) as http,
        ):
            for length in lengths:
                rows.append({"by": by, **await _length(http, source, target, engines, length, rounds)})
                print(rows[-1], flush=True)
    finally:
        for engine in engines:
            await asyncio.to_thread(engine.close)
    return rows


async def _length(
    http: httpx.AsyncClient, source: str, target: str, engines: list[EmbeddedEngine], length: int, rounds: int
) -> dict[str, Any]:
    migrator = EmbeddedMigrator(http)
    times: dict[str, list[float]] = {"prefill_ms": [], "move_ms": [], "after_ms": []}
    nbytes = 0
    for number in range(rounds):
        ids = np.random.default_rng(number).integers(10, 250, length).tolist()
        await ask(http, source, ids)
        times["prefill_ms"].append(1e3 * await ask(http, target, ids))
        engines[1].update_weights(None, engines[1].version)  # forget it
        began = time.perf_counter()
        moved = await migrator.move(source, target, ids, {})
        times["move_ms"].append(1e3 * (time.perf_counter() - began))
        assert moved.tokens == length - 1, moved
        nbytes = moved.nbytes
        times["after_ms"].append(1e3 * await ask(http, target, ids))
        for engine in engines:
            engine.update_weights(None, engine.version)
    middle = {name: round(statistics.median(values), 2) for name, values in times.items()}
    ratio = middle["prefill_ms"] / (middle["move_ms"] + middle["after_ms"])
    return {"tokens": length, "mib": round(nbytes / 2**20, 2), **middle, "ratio": round(ratio, 2)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, `smollm2` or `tiny`")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    lengths, rounds = ([200], 2) if chosen.quick else ([200, 800], 5)
    rows = []
    with tempfile.TemporaryDirectory(prefix="gyre-kv-") as scratch:
        for by in ("http", "file", "mooncake"):
            rows += asyncio.run(measure(model_dir(chosen.model), by, lengths, rounds, Path(scratch)))
    if chosen.json:
        meta = {"model": chosen.model, "quick": chosen.quick, "rounds": rounds, "machine": platform.platform()}
        chosen.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
