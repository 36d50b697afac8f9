"""A server under test: started, asked, held to its contract. Nothing here knows which engine it is."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

LONG = 3000
"""Tokens: more than any test lets a call finish."""


class Served:
    """One server and its usual questions."""

    def __init__(self, url: str, home: Path, other: Path, seconds: float) -> None:
        self.url, self.home, self.other, self.seconds = url, str(home), str(other), seconds
        self.http = httpx.Client(base_url=url, timeout=180, trust_env=False)
        self._numbers = itertools.count()
        self._random = random.Random(7)

    def prompt(self, count: int = 12) -> list[int]:
        """Ids that share no prefix with another prompt (of any use)."""
        return [self._random.randrange(20, 250) for _ in range(count)]

    def rid(self) -> str:
        return f"t{os.getpid()}.c{next(self._numbers):05d}."

    def body(self, ids: list[int], count: int = 8, **more: Any) -> dict[str, Any]:
        params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **more.pop("params", {})}
        return {"rid": self.rid(), "input_ids": ids, "sampling_params": params, "return_logprob": True, **more}

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body)

    def ok(self, path: str, body: Any = None) -> Any:
        answer = self.http.get(path) if body is None else self.post(path, body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:300]}"
        return answer.json()

    def generate(self, ids: list[int], count: int = 8, **more: Any) -> dict[str, Any]:
        data: dict[str, Any] = self.ok("/generate", self.body(ids, count, **more))
        return data

    def load(self) -> dict[str, Any]:
        load: dict[str, Any] = self.ok("/v1/loads")["loads"][0]
        return load

    @property
    def version(self) -> str:
        return str(self.ok("/model_info")["weight_version"])

    @property
    def checksum(self) -> Any:
        return self.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["per_gpu_checksum"]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.seconds
        while not condition():
            assert time.monotonic() < end, f"not within {self.seconds} s: {what}"
            time.sleep(0.03)

    def settle(self) -> None:
        """Back to an idle, unpaused server."""
        self.post("/continue_generation")
        self.post("/abort_request", {"abort_all": True})
        self.until(lambda: self.load()["num_running_reqs"] + self.load()["num_waiting_reqs"] == 0, "idle")

    def start(self, ids: list[int] | None = None, count: int = LONG, **more: Any) -> Running:
        return Running(self, self.body(ids or self.prompt(), count, stream=True, **more))


class Running:
    """A streamed call on a thread of its own."""

    def __init__(self, server: Served, body: dict[str, Any]) -> None:
        self.server, self.rid, self.prompt = server, body["rid"], body["input_ids"]
        self.tokens = 0
        self.events: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.ended: float | None = None
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: dict[str, Any]) -> None:
        try:
            with self.server.http.stream("POST", "/generate", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "meta_info" in event, event
                        self.events.append(event)
                        self.tokens = event["meta_info"]["completion_tokens"]
        except BaseException as error:
            self.error = error
        self.ended = time.monotonic()

    @property
    def done(self) -> bool:
        return self.ended is not None

    def wait_tokens(self, count: int = 3) -> Running:
        """Until at least so many tokens have come."""
        self.server.until(lambda: self.tokens >= count or self.done, f"{count} tokens of {self.rid}")
        assert not self.done, self.error or self.events[-1:]
        return self

    def result(self) -> dict[str, Any]:
        """The last event's meta_info, and all `ids` and `logprobs` whether they came whole or in pieces."""
        self._thread.join(self.server.seconds)
        assert self.done, f"{self.rid} did not end"
        if self.error is not None:
            raise self.error
        ids: list[int] = []
        logprobs: list[float] = []
        for event in self.events:
            meta = event["meta_info"]
            if len(event["output_ids"]) == meta["completion_tokens"]:
                ids, logprobs = [], []
            ids += event["output_ids"]
            logprobs += [entry[0] for entry in meta.get("output_token_logprobs") or []]
        meta = self.events[-1]["meta_info"]
        assert len(ids) == meta["completion_tokens"] == len(logprobs)
        return {**meta, "ids": ids, "logprobs": logprobs}


@contextlib.contextmanager
def process(command: tuple[str, ...], url: str | None, log: Path, seconds: float) -> Iterator[str]:
    """Start a server; yields its URL once it is healthy (from its ready line when `url` is None); ends it afterwards."""
    with log.open("wb") as errors:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if url is None:
            line = child.stdout.readline()
            assert line, log.read_text()[-2000:]
            url = json.loads(line)["url"]
        else:
            threading.Thread(target=child.stdout.read, daemon=True).start()
        end = time.monotonic() + seconds
        while True:
            assert child.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, f"not healthy within {seconds} s"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200:
                    break
            time.sleep(0.2)
        yield url
    finally:
        child.stdin.close()
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application from a thread of this process; yields its URL."""
    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
