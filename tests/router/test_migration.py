"""Real embedded engines behind the router: a moved call goes on exactly, with or without its keys and values."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from gyre_backend.engines.embedded import EmbeddedEngine, load_model
from gyre_backend.models import tiny_dir
from gyre_backend.router import Router, RouterConfig
from gyre_backend.weights import make_transport
from gyre_sdk.sampling import Completion, GenerateRequest, Sampling, SGLangClient
from tests.router.conftest import serve

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model") / "tiny")


async def finish(client: SGLangClient, rid: str, prompt: list[int], count: int, seed: int) -> Completion:
    sampling = Sampling(max_new_tokens=count, ignore_eos=True, seed=seed)
    request = GenerateRequest(rid=rid, input_ids=np.asarray(prompt, np.int32), sampling=sampling, cache_salt="w1")
    async for part in client.generate(request):
        if isinstance(part, Completion):
            return part
    raise AssertionError("no completion")


@pytest.mark.parametrize(
    ("migrator", "version", "moved_kv", "by"),
    [
        ("prefill", 1, False, None),
        ("embedded", 1, True, None),
        ("embedded", 1, True, "file"),
        ("embedded", 1, True, "mooncake"),
        ("embedded", 2, False, "file"),
    ],
)
async def test_a_moved_call_is_the_call_that_was_not_moved(
    model_dir: Path, migrator: str, version: int, moved_kv: bool, by: str | None, tmp_path: Path
) -> None:
    if by == "mooncake":
        pytest.importorskip("mooncake.engine")
    prompt, count = list(range(30, 150)), 200
    transports = [make_transport(by, folder=tmp_path / side) if by else None for side in ("source", "target")]
    engines = [
        EmbeddedEngine(load_model(model_dir), version=v, transport=t)
        for v, t in zip((1, version), transports, strict=True)
    ]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        for engine in engines:
            stack.callback(engine.close)
        router = Router(RouterConfig(migrator=migrator))
        client = SGLangClient(await stack.enter_async_context(serve(router.app())))
        direct = SGLangClient(urls[1])
        whole = await finish(direct, "whole.", prompt, count, seed=3)
        await direct.abort("whole.")
        engines[1].update_weights(None, version)  # forget what the reference left in the cache
        await router.add("cell0", urls[0], 1)
        call = asyncio.create_task(finish(client, "e1.c1.", prompt, count, seed=3))
        while not any(len(relay.joined.ids) > 10 for relay in router.relays.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await router.add("cell1", urls[1], version)
        assert await router.drain("cell0") == 1
        done = await call
        assert done.output_ids.tolist() == whole.output_ids.tolist()
        assert np.abs(done.logprobs - whole.logprobs).max() < 1e-4
        assert [span.version for span in done.versions] == ([1] if version == 1 else [1, 2])
        counters = router.counters()
        assert (counters["migrated_tokens"] > len(prompt)) == moved_kv
        assert (counters["recomputed_tokens"] <= 2) == moved_kv
        assert counters["migrated_bytes"] == counters["migrated_tokens"] * engines[0].kv_layout.bytes_per_token
        assert [engine.exchange.pinned for engine in engines] == [0, 0], "the source did not let go"
        for each in (client, direct, router):
            await each.aclose()
