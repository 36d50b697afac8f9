"""The routes by which keys and values move: what they refuse, and that a refusal keeps nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_backend.engines.embedded import EmbeddedEngine, load_model
from gyre_backend.models import tiny_dir
from gyre_backend.weights import Manifest, make_transport

pytestmark = pytest.mark.anyio
PROMPT = list(range(30, 90))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.asynccontextmanager
async def engine(
    folder: Path, by: Path | None = None, **options: Any
) -> AsyncIterator[tuple[EmbeddedEngine, httpx.AsyncClient]]:
    transport = make_transport("file", folder=by) if by is not None else None
    made = EmbeddedEngine(load_model(folder, **options), transport=transport)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(made.app()), base_url="http://engine") as http:
            yield made, http
    finally:
        await asyncio.to_thread(made.close)


async def warm(http: httpx.AsyncClient) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    assert (await http.post("/generate", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/kv/pin", "/kv/pull", "/kv/release"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"input_ids": "x"}', b'{"input_ids": [1, 99999999999]}', b'{"ticket": 3}']
)
async def test_what_is_no_request_is_a_400(model_dir: Path, path: str, body: bytes) -> None:
    async with engine(model_dir) as (_, http):
        answer = await http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


async def test_more_tokens_than_ids_is_a_400(model_dir: Path) -> None:
    async with engine(model_dir) as (_, http):
        for tokens in (0, -1, 3):
            body = {"input_ids": [1, 2], "source": "http://x", "ticket": "t", "tokens": tokens, "version": "0"}
            assert (await http.post("/kv/pull", json=body)).status_code == 400


async def test_a_pin_is_let_go_once(model_dir: Path) -> None:
    async with engine(model_dir) as (made, http):
        assert (await http.post("/kv/pin", json={"input_ids": PROMPT})).status_code == 404
        await warm(http)
        ticket = (await http.post("/kv/pin", json={"input_ids": PROMPT})).json()["ticket"]
        assert made.exchange.pinned == 1
        assert (await http.get("/kv/read", params={"ticket": ticket})).status_code == 200
        for released in (True, False):
            assert (await http.post("/kv/release", json={"ticket": ticket})).json() == {"released": released}
        assert (await http.get("/kv/read", params={"ticket": ticket})).status_code == 404


async def test_what_does_not_fit_or_was_changed_is_not_kept(model_dir: Path, tmp_path: Path) -> None:
    """Another layout, a forged manifest, a source that has let go already: 502, and the target's cache is as it was."""
    async with (
        engine(model_dir, tmp_path / "a") as (_, source),
        engine(model_dir, tmp_path / "b", dtype="float64") as (_, other),
        engine(model_dir, tmp_path / "c") as (target, http),
    ):
        await warm(source)
        pinned = (await source.post("/kv/pin", json={"input_ids": PROMPT})).json()
        body = {"input_ids": PROMPT, "source": "http://127.0.0.1:9", **pinned}
        assert (await other.post("/kv/pull", json=body)).status_code == 502
        manifest = Manifest.from_bytes(_bytes(pinned["manifest"]))
        file = Path(manifest.session)
        good = file.read_bytes()
        file.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        refused = await http.post("/kv/pull", json=body)
        assert refused.status_code == 502
        assert "digest" in refused.json()["error"]["message"]
        assert target.core.cached_tokens == 0
        file.write_bytes(good)
        taken = await http.post("/kv/pull", json=body)
        assert taken.json()["by"] == "file"
        assert target.core.cached_tokens >= taken.json()["tokens"] == len(PROMPT) - 1
        await source.post("/kv/release", json={"ticket": pinned["ticket"]})
        assert (await http.post("/kv/pull", json=body)).status_code == 502


def _bytes(text: str) -> bytes:
    import base64

    return base64.b64decode(text)
