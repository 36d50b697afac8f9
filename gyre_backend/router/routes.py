"""SGLang's contract over all engines."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from gyre_backend.router.relay import Refused, Relay
from gyre_sdk.errors import EngineError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from gyre_backend.router.router import Router

_DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class RouterRoutes:
    """The router's HTTP."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._numbers = itertools.count()

    def routes(self) -> list[BaseRoute]:
        """To be mounted anywhere."""
        return [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/abort_request", self._abort, methods=["POST"]),
            Route("/model_info", self._model_info, methods=["GET"]),
            Route("/server_info", self._model_info, methods=["GET"]),
            Route("/v1/loads", self._loads, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
        ]

    async def _generate(self, request: Request) -> Response:
        try:
            body = _body(await request.body())
            rid = str(body.get("rid") or f"r{os.getpid()}.{next(self._numbers):08d}.")
            relay = self._router.open_relay(rid, body)
        except Refused as error:
            return _refusal(error)
        task = asyncio.create_task(relay.run(), name=f"relay-{rid}")
        # The status code is only known with the first thing that the engine says.
        gone = asyncio.create_task(_disconnected(request))
        try:
            first = await _next(relay, gone)
            while not body.get("stream") and isinstance(first, dict) and first["meta_info"]["finish_reason"] is None:
                first = await _next(relay, gone)
        except BaseException:  # cleans up and raises again
            await _hang_up(relay, task)
            raise
        finally:
            gone.cancel()
        if first is None:
            await _hang_up(relay, task)
            return Response(status_code=499)
        if isinstance(first, EngineError):
            return _refusal(first)
        if body.get("stream"):
            return _Stream(relay, task, first)
        finish = first["meta_info"]["finish_reason"]
        return _json(relay.joined.event(rid, 0, first["meta_info"]["engine"], finish))

    async def _abort(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body() or b"{}")
        except msgspec.DecodeError:
            body = None
        if not isinstance(body, dict) or not (body.get("abort_all") or isinstance(body.get("rid"), str)):
            return _refusal(Refused(400, "abort_request needs a rid, or abort_all"))
        relays = self._router.relays
        if body.get("abort_all"):
            chosen = list(relays.values())
        else:
            rid = body["rid"]
            chosen = [relay for name, relay in relays.items() if name.startswith(rid)] if rid in relays else []
        await asyncio.gather(*(relay.abort() for relay in chosen))
        return Response(status_code=200)

    async def _model_info(self, request: Request) -> Response:
        if not self._router.info:
            return _refusal(Refused(503, "no engine has come up yet", self._router.config.retry_after_s))
        return _json(self._router.info)

    async def _loads(self, request: Request) -> Response:
        counters = self._router.counters()
        loads = [
            {
                "dp_rank": rank,
                "engine": engine.name,
                "num_running_reqs": len(engine.calls),
                "num_waiting_reqs": 0,
                "max_running_requests": engine.slots,
                "draining": engine.draining,
                "suspect": engine.suspect,
                "weight_version": engine.version,
            }
            for rank, engine in enumerate(self._router.engines.values())
        ]
        return _json({"loads": loads, "num_waiting_reqs": int(counters["waiting"])})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if any(e.open for e in self._router.engines.values()) else 503)


class _Stream(StreamingResponse):
    """Server-sent events of a relay; the relay ends when the client goes."""

    def __init__(self, relay: Relay, task: asyncio.Task[None], first: dict[str, Any]) -> None:
        super().__init__(_lines(relay, first), media_type="text/event-stream")
        self._relay = relay
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _hang_up(self._relay, self._task)


async def _lines(relay: Relay, event: dict[str, Any] | EngineError) -> AsyncIterator[bytes]:
    while isinstance(event, dict):
        line = b"data: " + encode(event) + b"\n\n"
        if event["meta_info"]["finish_reason"] is not None:
            yield line + _DONE
            return
        yield line
        event = await relay.events.get()
    yield b"data: " + encode({"error": {"message": str(event), "code": event.status or 503}}) + b"\n\n" + _DONE


async def _next(relay: Relay, gone: asyncio.Task[None]) -> dict[str, Any] | EngineError | None:
    """The relay's next event; None when the client is gone."""
    if not relay.events.empty():
        return relay.events.get_nowait()
    getter = asyncio.create_task(relay.events.get())
    try:
        await asyncio.wait({getter, gone}, return_when=asyncio.FIRST_COMPLETED)
        return getter.result() if getter.done() else None
    finally:
        getter.cancel()


async def _hang_up(relay: Relay, task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()  # closes the connection to the engine, which ends the call there
    await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _body(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("input_ids"), list) or not body["input_ids"]:
        raise Refused(400, "input_ids must be a list of token ids")
    if not isinstance(body.get("sampling_params") or {}, dict):
        raise Refused(400, "sampling_params must be an object")
    wanted = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise Refused(400, "sampling_params.max_new_tokens must be an integer")
    return body


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(data), status, headers, media_type="application/json")


def _refusal(error: EngineError) -> Response:
    status = error.status or 503
    headers = {"retry-after": f"{error.retry_after:.0f}"} if error.retry_after else None
    return _json({"error": {"message": str(error), "code": status}}, status, headers)
