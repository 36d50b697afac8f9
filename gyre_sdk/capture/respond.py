"""Sending replies over ASGI: whole or as a stream, knowing whether the client got the last byte."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from gyre_sdk.capture.dialects.base import Dialect, Ident, Problem, StreamWriter, problem_of
from gyre_sdk.capture.live import LiveCall
from gyre_sdk.capture.model import ModelRequest
from gyre_sdk.capture.recorder import Recorder
from gyre_sdk.errors import GyreError, RequestError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

CALL_HEADER = b"x-gyre-call"


class Client:
    """The other end of a request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.started = False

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises RequestError (413) when it is larger than `limit`."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the client went away before its request was whole", status=499)
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise RequestError(f"the request is larger than {limit} bytes", status=413, code="too_large")
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def watch(self) -> asyncio.Task[None]:
        """A task that ends when the client is gone."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._until_gone())
        return self._watch

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.cancel()

    @property
    def gone(self) -> bool:
        """Whether the client is known to have gone."""
        return self._watch is not None and self._watch.done()

    async def is_gone(self) -> bool:
        """Whether the client has gone, as far as the event loop can know now.

        Asked before the last byte is sent: after it a server reports every client as gone.
        """
        await asyncio.sleep(0)
        return self.gone

    async def start(self, status: int, content_type: str, headers: Mapping[bytes, bytes], length: int | None) -> None:
        """Send the status line and headers."""
        listed = [(b"content-type", content_type.encode()), *headers.items()]
        if length is not None:
            listed.append((b"content-length", str(length).encode()))
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, status: int, data: object, headers: Mapping[bytes, bytes] = {}) -> None:
        """Send a whole JSON reply."""
        body = msgspec.json.encode(data)
        await self.start(status, "application/json", headers, len(body))
        await self.send(body, more=False)


async def send_problem(client: Client, dialect: Dialect, problem: Problem) -> None:
    """An error as a whole reply, in the dialect's shape."""
    headers: dict[bytes, bytes] = {}
    if problem.retry_after is not None:
        headers[b"retry-after"] = str(max(1, math.ceil(problem.retry_after))).encode()
        headers[b"retry-after-ms"] = str(math.ceil(problem.retry_after * 1000)).encode()
    await client.json(problem.status, dialect.error(problem), headers)


async def answer(client: Client, dialect: Dialect, request: ModelRequest, recorder: Recorder, call: LiveCall) -> None:
    """Send a call's reply, and record whether all of it was handed over."""
    complete = False
    try:
        ident = Ident(recorder.execution, call.number, int(call.created), call.prompt_tokens)
        if request.stream:
            complete = await _stream(client, dialect, request, ident, recorder, call)
        else:
            complete = await _whole(client, dialect, request, ident, call)
    finally:
        recorder.detach(call, complete=complete)


async def _whole(client: Client, dialect: Dialect, request: ModelRequest, ident: Ident, call: LiveCall) -> bool:
    finished = asyncio.ensure_future(call.finished())
    try:
        await asyncio.wait({finished, client.watch()}, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            return False
        reply = finished.result()
    finally:
        finished.cancel()
    if await client.is_gone():
        return False
    await client.json(200, dialect.reply(request, reply, ident), {CALL_HEADER: str(call.number).encode()})
    return True


async def _stream(
    client: Client, dialect: Dialect, request: ModelRequest, ident: Ident, recorder: Recorder, call: LiveCall
) -> bool:
    writer = dialect.stream(request, ident)
    client.watch()
    try:
        async for update in call.updates(recorder.config.keepalive_s):
            if client.gone:
                return False
            if not client.started:
                await client.start(200, dialect.stream_type(request), _stream_headers(call), None)
                await client.send(writer.start(), more=True)
            if update.reply is not None:
                if await client.is_gone():
                    return False
                await client.send(writer.finish(update.reply), more=False)
                return True
            data = writer.partial(update.partial) if update.partial is not None else writer.idle()
            if data:
                await client.send(data, more=True)
    except GyreError as error:
        if not client.started:
            raise
        await _break(client, writer, problem_of(error, recorder.config.retry_after_s))
    return False


def _stream_headers(call: LiveCall) -> dict[bytes, bytes]:
    return {b"cache-control": b"no-cache", b"x-accel-buffering": b"no", CALL_HEADER: str(call.number).encode()}


BREAK_S = 0.2
"""From the error event of a broken stream to its reset."""


async def _break(client: Client, writer: StreamWriter, problem: Problem) -> None:
    """End a stream that can't be finished: the error event, and never a clean end.

    Raising without the last body message makes the server drop the connection. Clients throw away what they have not
    read yet when that happens, so the error gets a moment to be seen.
    """
    if not client.gone:
        await client.send(writer.error(problem), more=True)
        await asyncio.wait({client.watch()}, timeout=BREAK_S)
        raise StreamBrokenError(problem.message)


class StreamBrokenError(Exception):
    """Raised into the server so that it resets the connection; never leaves the gateway's app."""
