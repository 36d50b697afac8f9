"""Routes for the owner of a run: open an execution, seal it, see how things stand. A separate token guards them."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.errors import ConfigError, EngineError, GyreError, StorageError
from gyre_sdk.serving.settings import ADMIN, OpenReply, OpenRequest, Status
from gyre_sdk.stream import FrameSender
from gyre_sdk.wire.records import Outcome

MAX_BODY_BYTES = 2**20
MAX_DRAIN_S = 600.0
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def admin_routes(gateway: Gateway, token: str, sender: FrameSender | None = None) -> list[Route]:
    """The routes; none when `token` is empty."""
    if not token:
        return []
    admin = _Admin(gateway, token, sender)
    return [
        Route(f"{ADMIN}/executions", admin.guarded(admin.open), methods=["POST"]),
        Route(f"{ADMIN}/executions/{{execution}}/seal", admin.guarded(admin.seal), methods=["POST"]),
        Route(f"{ADMIN}/status", admin.guarded(admin.status), methods=["GET"]),
        Route(f"{ADMIN}/drain", admin.guarded(admin.drain), methods=["POST"]),
    ]


class _Admin:
    def __init__(self, gateway: Gateway, token: str, sender: FrameSender | None) -> None:
        self.gateway = gateway
        self.token = token.encode()
        self.sender = sender

    def guarded(self, handler: Handler) -> Handler:
        """Answers who has no admin token, and turns our errors into status codes."""

        async def guard(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self.token):
                return JSONResponse({"error": "the admin token is missing or wrong"}, status_code=401)
            try:
                return await handler(request)
            except GyreError as error:
                return JSONResponse({"error": str(error)}, status_code=_status(error))

        return guard

    async def open(self, request: Request) -> Response:
        asked = await _body(request, OpenRequest)
        spec = ExecutionSpec(
            execution=asked.execution,
            group=asked.group,
            task=asked.task,
            harness=asked.harness,
            deadline_s=asked.deadline_s,
            meta=asked.meta,
        )
        handle = await self.gateway.open(spec, asked.token)
        return _json(OpenReply(handle.execution, handle.token, handle.base_url))

    async def seal(self, request: Request) -> Response:
        outcome = await _body(request, Outcome)
        with anyio.CancelScope(shield=True):
            await self.gateway.seal(request.path_params["execution"], outcome)
        return _json({})

    async def status(self, request: Request) -> Response:
        stream = self.sender.status() if self.sender is not None else None
        return _json(
            Status(
                executions=sorted(self.gateway.executions()),
                damaged=self.gateway.damaged,
                behind_bytes=stream.behind_bytes if stream else 0,
                stream_error=stream.last_error if stream and stream.failures else "",
            )
        )

    async def drain(self, request: Request) -> Response:
        asked = request.query_params.get("timeout", "30")
        timeout = float(asked) if asked.replace(".", "", 1).isdigit() else 30.0
        drained = self.sender is None or await self.sender.drain(min(timeout, MAX_DRAIN_S))
        return _json({"drained": drained})


async def _body(request: Request, kind: type[T]) -> T:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise ConfigError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the body can't be read: {error}") from error


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _status(error: GyreError) -> int:
    if isinstance(error, StorageError):
        return 507
    return 503 if isinstance(error, EngineError) else 409
