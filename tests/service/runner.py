"""A runner that plays harnesses: follows orders, makes records (sampled through the router, or fixed), posts
frames.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from gyre_sdk.wire import encode, pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Intent, Opened, Outcome, Record, Result, Sealed, Span

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "test-token"
PATIENCE_S = 300.0
"""A service that starts again on a busy machine loads its libraries for minutes."""


@dataclass
class Backend:
    """A service process."""

    process: subprocess.Popen[str]
    url: str
    run_dir: Path
    log: Path


@contextmanager
def backend(config: Path, run_dir: Path, *, port: int = 0, timeout_s: float = 110.0) -> Iterator[Backend]:
    """Start `python -m gyre_backend.service`; killed at the end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "backend.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gyre_backend.service",
                "--config",
                str(config),
                "--run-dir",
                str(run_dir),
                "--port",
                str(port),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "GYRE_ADMIN_TOKEN": TOKEN, "MC_TRANSFER_TIMEOUT": "5", "GLOG_minloglevel": "2"},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith('{"ready"'):
            raise AssertionError(f"not ready: {log.read_text()[-2000:]}")
        yield Backend(process, str(msgspec.json.decode(line)["url"]), run_dir, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass
class Runner:
    """One scripted runner. `fixed`: records depend on the group's number alone, nothing is sampled."""

    url: str
    fixed: bool = False
    calls: int = 3
    reply: int = 12
    name: str = "runner-1"
    waits: tuple[float, float] = (0.0, 0.0)
    """Bounds of the pause between two calls, seconds (a tool)."""
    seed: int = 0
    versions: set[int] = field(default_factory=set)
    served: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    hello: dict[str, Any] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Until the service says stop."""
        timeout = httpx.Timeout(120.0)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        ) as http:
            self.hello = (await self._patiently(http, "POST", "/v1/hello", json=self._me())).json()
            after = -1
            while not self.reason:
                answer = await self._patiently(http, "GET", "/v1/orders", params={"after": after, "wait": 10})
                for order in answer.json()["orders"]:
                    after = order["order"]
                    await self._obey(http, order)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _me(self) -> dict[str, Any]:
        return {"runner": self.name, "tasks": ["a", "b", "c"], "slots": 64, "harness": "scripted"}

    async def _obey(self, http: httpx.AsyncClient, order: dict[str, Any]) -> None:
        if order["kind"] == "group":
            for number, execution in enumerate(order["executions"]):
                task = asyncio.create_task(self._execute(http, order, execution, number))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
        elif order["kind"] == "stop":
            self.status = (await self._patiently(http, "GET", "/v1/status")).json()
            self.reason = order["reason"]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(repr(task.exception()))

    async def _patiently(self, http: httpx.AsyncClient, method: str, path: str, **arguments: Any) -> httpx.Response:
        """A service that restarts is waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = await http.request(method, path, **arguments)
                if answer.status_code < 500:
                    assert answer.status_code == 200, (path, answer.status_code, answer.text)
                    return answer
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"{path} did not answer")
            await asyncio.sleep(0.1)

    async def _execute(self, http: httpx.AsyncClient, order: dict[str, Any], execution: str, number: int) -> None:
        rng = np.random.default_rng([self.seed, int(order["group"][1:]), number])
        shared = np.random.default_rng([self.seed, int(order["group"][1:])])
        records: list[Record] = [
            Opened(
                execution=execution,
                at=time.time(),
                group=order["group"],
                task=order["task"],
                harness="scripted",
                model="policy",
            )
        ]
        await self._post(http, execution, records, 0)
        prompt = [1, *shared.integers(3, 300, 20).tolist()]
        base, length, delta = -1, 0, prompt
        for call in range(self.calls):
            await asyncio.sleep(float(rng.uniform(*self.waits)) if self.waits[1] else 0)
            first = len(records)
            records.append(
                Intent(call=call, at=time.time(), dialect="test", base_call=base, base_len=length, delta=_ids(delta))
            )
            ids, logprobs, spans = await self._reply(http, execution, call, prompt, rng)
            records.append(
                Result(
                    call=call,
                    at=time.time(),
                    ids=_ids(ids),
                    logprobs=pack_floats(np.array(logprobs, np.float32)),
                    versions=spans,
                    finish="length",
                )
            )
            records.append(Delivered(call=call, at=time.time(), complete=True))
            await self._post(http, execution, records, first)
            base, length = call, len(prompt) + len(ids)
            delta = [2, *rng.integers(3, 300, 4).tolist()]
            prompt = prompt + ids + delta
        outcome = Outcome(status="completed", reward=float(number % 2), valid=True)
        records.append(Sealed(at=time.time(), outcome=outcome))
        await self._post(http, execution, records, len(records) - 1)

    async def _reply(
        self, http: httpx.AsyncClient, execution: str, call: int, prompt: list[int], rng: np.random.Generator
    ) -> tuple[list[int], list[float], tuple[Span, ...]]:
        if self.fixed:
            return rng.integers(3, 300, self.reply).tolist(), [-5.5] * self.reply, (Span(0, 0, self.reply),)
        body = {
            "rid": f"e{execution}.c{call:06d}.",
            "input_ids": prompt,
            "session_id": execution,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": self.reply, "temperature": 1.0, "ignore_eos": True},
        }
        answer = (await self._patiently(http, "POST", "/generate", json=body)).json()
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length", meta
        spans = tuple(Span(int(s["version"]), s["start"], s["end"]) for s in meta["weight_versions"])
        self.versions |= {span.version for span in spans}
        self.served[execution, call] = answer["output_ids"]
        return answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], spans

    async def _post(self, http: httpx.AsyncClient, execution: str, records: list[Record], first: int) -> None:
        """Send from `first`; a service that restarted says where it wants to go on from."""
        want = first
        while want < len(records):
            body = b"".join(encode(record, seq) for seq, record in enumerate(records) if seq >= want)
            answer = await self._patiently(
                http, "POST", "/v1/frames", params={"execution": execution, "from": want}, content=body
            )
            want = answer.json()["want"]


def _ids(ids: list[int]) -> bytes:
    return pack_ids(np.array(ids, np.int32))
