"""A router over scripted engines, all on real sockets in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import uvicorn

from gyre_backend.router import Router, RouterConfig
from gyre_sdk.sampling import Completion, GenerateRequest, Sampling, SGLangClient
from tests.router.scripted import Scripted, expected


@contextlib.asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0, ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class World:
    """Engines by name, the router in front of them, and a client."""

    def __init__(
        self, router: Router, client: SGLangClient, urls: dict[str, str], engines: dict[str, Scripted]
    ) -> None:
        self.router, self.client, self.urls, self.engines = router, client, urls, engines
        self._count = 0

    async def add(self, *names: str) -> None:
        for name in names:
            await self.router.add(name, self.urls[name], self.engines[name].version)

    def request(self, prompt: list[int], count: int, session: str = "") -> GenerateRequest:
        self._count += 1
        rid = f"e{session or self._count:0>12}.c{self._count:06d}."
        sampling = Sampling(max_new_tokens=count, ignore_eos=True)
        return GenerateRequest(rid=rid, input_ids=np.asarray(prompt, np.int32), sampling=sampling, session=session)

    async def call(self, prompt: list[int], count: int, session: str = "") -> Completion:
        return await self.finish(self.request(prompt, count, session))

    async def finish(self, request: GenerateRequest) -> Completion:
        seen: list[int] = []
        async for part in self.client.generate(request):
            if isinstance(part, Completion):
                assert seen == part.output_ids.tolist()
                return part
            seen += part.output_ids.tolist()
        raise AssertionError("no completion")

    def check(self, done: Completion, prompt: list[int], count: int) -> None:
        """Whole, in order, with its own logprobs and a version for every token."""
        ids = expected(prompt, count)
        assert done.output_ids.tolist() == ids
        assert done.logprobs.tolist() == pytest.approx([-token / 1000 for token in ids])
        assert done.finish == "length"
        assert [span.start for span in done.versions] == [0, *(span.end for span in done.versions[:-1])]
        assert done.versions[-1].end == count

    def running(self, name: str) -> int:
        return len(self.engines[name].live)

    async def until(self, condition: Any) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not happen")


@contextlib.asynccontextmanager
async def world(*engines: Scripted, **config: Any) -> AsyncIterator[World]:
    router = Router(RouterConfig(**{"probe_s": 0.05, "retry_after_s": 3.0, **config}))
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine.app())) for engine in engines}
        url = await stack.enter_async_context(serve(router.app()))
        client = SGLangClient(url)
        try:
            yield World(router, client, urls, {engine.name: engine for engine in engines})
        finally:
            await client.aclose()
            await router.aclose()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
