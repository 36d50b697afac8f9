"""Latency that the router adds: the same calls to an engine directly and through the router, taken in turns.

    python -m benchmarks.router [--quick] --json FILE

The engine answers at once (one token, made up), so that what remains is HTTP and the router. Rows: direct, routed, added;
milliseconds to the whole reply, at the given number of prompt tokens; and the router's own CPU time per call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gyre_backend.corked import server_config

WARM_UP = 20


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far (Linux): what a call costs, however busy the machine is with other work."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fake_engine() -> Any:
    """SGLang's contract with nothing behind it."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def generate(request: Request) -> Response:
        body = json.loads(await request.body())
        meta = {
            "id": body["rid"], "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 1, "cached_tokens": 0, "weight_version": "0", "output_token_logprobs": [[-1.0, 7, None]],
        }  # fmt: skip
        event = f"data: {json.dumps({'output_ids': [7], 'meta_info': meta})}\n\ndata: [DONE]\n\n"
        return StreamingResponse(iter([event]), media_type="text/event-stream")

    async def info(request: Request) -> Response:
        return JSONResponse({"model_path": "fake", "weight_version": "0", "max_running_requests": 64})

    return Starlette(
        routes=[Route("/generate", generate, methods=["POST"]), Route("/model_info", info), Route("/server_info", info)]
    )


def routed(engine: str) -> Any:
    """A router over one engine."""
    from contextlib import asynccontextmanager

    from starlette.applications import Starlette

    from gyre_backend.router import Router

    router = Router()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        await router.add("cell0", engine, 0)
        yield
        await router.aclose()

    return Starlette(routes=router.routes(), lifespan=lifespan)


def child(kind: str, engine: str) -> None:
    """One of the two servers, until stdin ends."""
    import threading

    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server = uvicorn.Server(server_config(fake_engine() if kind == "engine" else routed(engine), lifespan="auto"))

    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    server.run(sockets=[listener])


async def measure(urls: dict[str, str], calls: int, prompt: int) -> dict[str, list[float]]:
    """Seconds per call, in turns."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for url in urls.values():
            while True:
                try:
                    await http.get(f"{url}/model_info")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        for number in range(calls + WARM_UP):
            for name, url in urls.items():
                body = {
                    "rid": f"b{number:08d}.", "input_ids": list(range(prompt)), "sampling_params": {"max_new_tokens": 1},
                    "return_logprob": True, "stream": True, "session_id": "bench",
                }  # fmt: skip
                content = json.dumps(body).encode()
                began = time.perf_counter()
                answer = await http.post(f"{url}/generate", content=content)
                if number >= WARM_UP:
                    times[name].append(time.perf_counter() - began)
                assert answer.status_code == 200, answer.text
                assert "finish_reason" in answer.text
    return times


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(*chosen.child)
        return
    rows = []
    command = [sys.executable, "-m", "benchmarks.router", "--child"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "engine", "-"], **pipes) as engine:
        direct = engine.stdout.readline().strip()
        with subprocess.Popen([*command, "router", direct], **pipes) as router:
            urls = {"direct": direct, "routed": router.stdout.readline().strip()}
            for prompt in (200, 2000, 8000):
                calls = 100 if chosen.quick else 1000
                before = cpu_seconds(router.pid)
                times = asyncio.run(measure(urls, calls, prompt))
                cpu_ms = (cpu_seconds(router.pid) - before) * 1e3 / (calls + WARM_UP)
                times["added"] = [r - d for r, d in zip(times["routed"], times["direct"])]
                for name, values in times.items():
                    cuts = statistics.quantiles(values, n=100)
                    rows.append(
                        {"what": name, "prompt_tokens": prompt, "p50_ms": cuts[49] * 1e3, "p90_ms": cuts[89] * 1e3}
                    )
                    print(
                        "{what:8} {prompt_tokens:6} tokens   p50 {p50_ms:7.2f} ms   p90 {p90_ms:7.2f} ms".format(
                            **rows[-1]
                        )
                    )
                rows.append({"what": "router cpu", "prompt_tokens": prompt, "mean_ms": cpu_ms})
                print(f"router's own CPU time per call: {cpu_ms:.2f} ms")
            router.stdin.close()
        engine.stdin.close()
    if chosen.json:
        meta = {
            "benchmark": "router",
            "quick": chosen.quick,
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        chosen.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
