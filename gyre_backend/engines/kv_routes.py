"""Keys and values on their way to another embedded engine: pinned here, read by the other, then let go.

A pin is a copy, so nothing that happens to the cache afterwards (a flush, new weights) touches it. The bytes travel over HTTP in
safetensors' format, between engines of the same weight version only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_backend.engines.kv import SequenceKV

if TYPE_CHECKING:
    from gyre_backend.engines.core import EngineCore

MAX_PINS = 64
"""The oldest pin is dropped beyond that: its puller then computes the prefix again."""
_PULL_S = 30.0
_encode = msgspec.json.Encoder().encode


class KVRoutes:
    """Three routes of the source, one of the target."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._pins: OrderedDict[str, SequenceKV] = OrderedDict()

    def routes(self) -> list[Route]:
        """To be mounted with the engine's own."""
        return [
            Route("/kv/pin", self._pin, methods=["POST"]),
            Route("/kv/read", self._read, methods=["GET"]),
            Route("/kv/release", self._release, methods=["POST"]),
            Route("/kv/pull", self._pull, methods=["POST"]),
        ]

    async def _pin(self, request: Request) -> Response:
        """`{input_ids, cache_salt, extra_key}` -> `{ticket, tokens, version}`; 404 when nothing of it is held."""
        salt, ids = _key(msgspec.json.decode(await request.body()))
        version, (count, kv) = await asyncio.wrap_future(
            self._core.ask(lambda: (self._core.version, self._core.held(salt, ids)))
        )
        if kv is None:
            return Response(status_code=404)
        ticket = secrets.token_hex(16)
        self._pins[ticket] = kv
        while len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)
        return _json({"ticket": ticket, "tokens": count, "version": version})

    async def _read(self, request: Request) -> Response:
        kv = self._pins.get(request.query_params.get("ticket", ""))
        if kv is None:
            return Response(status_code=404)
        return Response(await asyncio.to_thread(kv.to_bytes), media_type="application/octet-stream")

    async def _release(self, request: Request) -> Response:
        self._pins.pop(str(msgspec.json.decode(await request.body()).get("ticket")), None)
        return _json({})

    async def _pull(self, request: Request) -> Response:
        """`{source, ticket, tokens, version, input_ids, cache_salt, extra_key}` -> `{tokens}`; 409 for other weights."""
        body = msgspec.json.decode(await request.body())
        if body["version"] != self._core.version:
            return Response(status_code=409)
        salt, ids = _key(body)
        async with httpx.AsyncClient(timeout=_PULL_S, trust_env=False) as http:
            answer = await http.get(f"{body['source']}/kv/read", params={"ticket": body["ticket"]})
        if answer.status_code != 200:
            return Response(status_code=502)
        kv = await asyncio.to_thread(SequenceKV.from_bytes, answer.content, int(body["tokens"]))

        def take() -> bool:
            # The weights may have changed while the bytes were on their way.
            if body["version"] != self._core.version:
                return False
            self._core.keep(salt, ids[: kv.length], kv)
            return True

        taken = await asyncio.wrap_future(self._core.ask(take))
        return _json({"tokens": kv.length}) if taken else Response(status_code=409)


def _key(body: dict[str, Any]) -> tuple[tuple[str | None, str | None], np.ndarray]:
    return (body.get("cache_salt"), body.get("extra_key")), np.asarray(body["input_ids"], np.int32)


def _json(data: Any) -> Response:
    return Response(_encode(data), media_type="application/json")
