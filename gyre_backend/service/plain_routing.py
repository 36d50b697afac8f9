"""The least router: every request goes to the cell that is in rollout, and waits while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

_FORWARDED = ("/generate", "/abort_request", "/model_info", "/v1/loads")


class PlainRouting:
    """Forwards byte for byte, to the first cell that is up."""

    def __init__(self) -> None:
        self._engines: dict[str, str] = {}
        self._up = asyncio.Event()
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))
        self._requests = 0

    def routes(self) -> list[BaseRoute]:
        """The forwarded routes, and health."""
        forwarded = [Route(path, self._forward, methods=["GET", "POST"]) for path in _FORWARDED]
        return [*forwarded, Route("/health", self._health), Route("/ready", self._health)]

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"engines": len(self._engines)})

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        self._requests += 1
        while not self._engines:
            await self._up.wait()
        url = next(iter(self._engines.values())) + request.url.path
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        try:
            answer = await self._http.send(
                self._http.build_request(request.method, url, content=body, headers=headers), stream=True
            )
        except httpx.TransportError as error:
            return JSONResponse({"error": {"message": f"the engine is gone: {error}"}}, status_code=503)
        return StreamingResponse(
            _body(answer), status_code=answer.status_code, media_type=answer.headers.get("content-type")
        )

    async def add(self, cell: str, url: str, version: int) -> None:
        """Send requests to this cell's engine from now on."""
        self._engines[cell] = url
        self._up.set()

    async def drain(self, cell: str) -> int:
        """Send it nothing more."""
        self.lost(cell)
        return 0

    def lost(self, cell: str) -> None:
        """The engine is gone."""
        self._engines.pop(cell, None)
        if not self._engines:
            self._up.clear()

    def published(self, version: int) -> None:
        """Nothing depends on it here."""

    def counters(self) -> Mapping[str, float]:
        """Requests so far."""
        return {"requests": self._requests}

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()
