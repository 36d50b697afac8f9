"""HTTP of keys and values that move between embedded engines of one weight version: pin, pull, release."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_backend.engines.calls import BadCallError
from gyre_backend.errors import WeightsError
from gyre_sdk.errors import EngineError

if TYPE_CHECKING:
    from gyre_backend.engines.core import EngineCore
    from gyre_backend.engines.kv import KVLayout, SequenceKV
    from gyre_backend.engines.kv_exchange import KVExchange

PIN_S = 60.0
"""A pin that nobody released by then is dropped: whoever asked for it is gone."""
_PULL_S = 30.0
_encode = msgspec.json.Encoder().encode
_Body = TypeVar("_Body")


class KeyBody(msgspec.Struct, kw_only=True):
    """Which prefix: leading tokens, and what separates cache entries."""

    input_ids: list[int]
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def salt(self) -> tuple[str | None, str | None]:
        """The cache's key beside the ids."""
        return self.cache_salt, self.extra_key

    @property
    def ids(self) -> NDArray[np.int32]:
        """int32[n]. Raises BadCallError for numbers that are no ids."""
        try:
            return np.asarray(self.input_ids, np.int32)
        except OverflowError as error:
            raise BadCallError("input_ids holds a number that is no token id") from error


class PullBody(KeyBody, kw_only=True):
    """What `/kv/pin` of the source answered, and where that is."""

    source: str
    ticket: str
    tokens: int
    version: str
    manifest: bytes | None = None


class ReleaseBody(msgspec.Struct):
    """A pin that is no longer needed."""

    ticket: str


class KVRoutes:
    """Three routes of the source, one of the target."""

    def __init__(self, core: EngineCore, exchange: KVExchange, layout: KVLayout) -> None:
        self._core = core
        self._exchange = exchange
        self._layout = layout

    def routes(self) -> list[Route]:
        """To be mounted with the engine's own."""
        return [
            Route("/kv/pin", _guarded(self._pin), methods=["POST"]),
            Route("/kv/read", _guarded(self._read), methods=["GET"]),
            Route("/kv/release", _guarded(self._release), methods=["POST"]),
            Route("/kv/pull", _guarded(self._pull), methods=["POST"]),
        ]

    async def _pin(self, request: Request) -> Response:
        """`KeyBody` -> `{ticket, tokens, version, manifest?}`; 404 when nothing of it is held."""
        body = await _body(request, KeyBody)
        salt, ids = body.salt, body.ids
        version, (count, kv) = await asyncio.wrap_future(
            self._core.ask(lambda: (self._core.version, self._core.held(salt, ids)))
        )
        if kv is None:
            return Response(status_code=404)
        ticket, manifest = await asyncio.to_thread(self._exchange.pin, kv)
        asyncio.get_running_loop().call_later(PIN_S, self._exchange.release, ticket)
        return _json({"ticket": ticket, "tokens": count, "version": version, "manifest": manifest})

    async def _read(self, request: Request) -> Response:
        data = await asyncio.to_thread(self._exchange.read, request.query_params.get("ticket", ""))
        if data is None:
            return Response(status_code=404)
        return Response(data, media_type="application/octet-stream")

    async def _release(self, request: Request) -> Response:
        body = await _body(request, ReleaseBody)
        return _json({"released": await asyncio.to_thread(self._exchange.release, body.ticket)})

    async def _pull(self, request: Request) -> Response:
        """`PullBody` -> `{tokens, bytes, by}`, which is the acknowledgement; 409 for other weights, 502 when nothing came."""
        body = await _body(request, PullBody)
        salt, ids = body.salt, body.ids
        if not 0 < body.tokens <= len(ids):
            raise BadCallError(f"{body.tokens} tokens of a prefix of {len(ids)}")
        if body.version != self._core.version:
            return Response(status_code=409)
        try:
            kv, by = await self._fetch(body)
        except (WeightsError, httpx.HTTPError) as error:
            return _json({"error": {"message": f"keys and values did not come: {error}", "code": 502}}, 502)

        def take() -> bool:
            # The weights may have changed while the bytes were on their way.
            if body.version != self._core.version:
                return False
            self._core.keep(salt, ids[: kv.length], kv)
            return True

        if not await asyncio.wrap_future(self._core.ask(take)):
            return Response(status_code=409)
        return _json({"tokens": kv.length, "bytes": kv.nbytes, "by": by})

    async def _fetch(self, body: PullBody) -> tuple[SequenceKV, str]:
        """Through the transport when both sides have one, else over HTTP."""
        transport = self._exchange.transport
        if body.manifest is not None and transport is not None:
            kv = await asyncio.to_thread(self._exchange.fetch, body.manifest, body.tokens, self._layout)
            return kv, transport.name
        async with httpx.AsyncClient(timeout=_PULL_S, trust_env=False) as http:
            answer = await http.get(f"{body.source}/kv/read", params={"ticket": body.ticket})
        if answer.status_code != 200:
            raise WeightsError(f"{body.source} answered {answer.status_code}")
        return await asyncio.to_thread(self._exchange.unpack, answer.content, body.tokens, self._layout), "http"


async def _body(request: Request, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.MsgspecError as error:
        raise BadCallError(f"not what {request.url.path} takes: {error}") from error


def _json(data: Any, status: int = 200) -> Response:
    return Response(_encode(data), status, media_type="application/json")


def _guarded(call: Any) -> Any:
    async def guarded(request: Request) -> Response:
        try:
            answer: Response = await call(request)
        except EngineError as error:
            status = error.status or 500
            return _json({"error": {"message": str(error), "code": status}}, status)
        return answer

    return guarded
