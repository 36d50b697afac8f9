"""Our servers' way of writing: what is made together leaves together, and nothing is held back or lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gyre_backend import corked

pytestmark = pytest.mark.anyio
CHUNK, BIG = b"x" * 300_000, 200


async def app(scope: Any, receive: Any, send: Any) -> None:
    """/short: head and body. /stream: three pieces, each after the one before was read. /big: more than a socket holds."""
    path = scope["path"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    if path == "/short":
        await send({"type": "http.response.body", "body": b"hello"})
        return
    for _ in range(3 if path == "/stream" else BIG):
        await send({"type": "http.response.body", "body": b"piece" if path == "/stream" else CHUNK, "more_body": True})
        if path == "/stream":
            await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, list[int]]]:
    writes: list[int] = []

    class Counted(corked._Corked):
        def _flush(self) -> None:
            if self._kept:
                writes.append(sum(map(len, self._kept)))
            super()._flush()

    monkeypatch.setattr(corked, "_Corked", Counted)
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(corked.server_config(app))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.005)
    yield listener.getsockname()[1], writes
    server.should_exit = True
    await task


@contextlib.asynccontextmanager
async def asked(port: int, path: str, more: str = "") -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode())
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_short_reply_is_one_write(port: tuple[int, list[int]]) -> None:
    async with asked(port[0], "/short") as reader:
        assert (await reader.readuntil(b"0\r\n\r\n")).count(b"hello") == 1
    assert len(port[1]) == 1


async def test_pieces_of_a_stream_leave_one_by_one(port: tuple[int, list[int]]) -> None:
    async with asked(port[0], "/stream") as reader:
        for number in range(3):
            await reader.readuntil(b"piece")
            assert len(port[1]) == number + 1
        await reader.readuntil(b"0\r\n\r\n")


async def test_a_reply_that_ends_the_connection_is_whole(port: tuple[int, list[int]]) -> None:
    async with asked(port[0], "/short", "connection: close\r\n") as reader:
        assert (await reader.read()).endswith(b"hello\r\n0\r\n\r\n")


async def test_a_slow_reader_gets_everything_and_holds_the_writer_up(port: tuple[int, list[int]]) -> None:
    async with asked(port[0], "/big", "connection: close\r\n") as reader:
        await asyncio.sleep(0.1)
        assert sum(port[1]) < BIG * len(CHUNK)
        assert (await reader.read()).count(CHUNK) == BIG


def test_the_protocol_is_uvicorns_own() -> None:
    assert any(base.__module__.startswith("uvicorn.protocols.http") for base in corked.CorkedProtocol.__mro__)
    assert H11Protocol.connection_made is not corked.CorkedProtocol.connection_made
