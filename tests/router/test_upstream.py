"""The router's connections: lines of any length and cut anywhere, connections used again, breaks as one error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gyre_backend.router.upstream import Upstream
from gyre_sdk.errors import EngineGoneError

pytestmark = pytest.mark.anyio


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream()
    yield made
    await made.aclose()


class Server:
    """Answers each request with `pieces`, written one after the other; then, with `breaks`, hangs up without an end."""

    def __init__(self, pieces: list[bytes], breaks: bool = False) -> None:
        self.pieces, self.breaks = pieces, breaks
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for piece in self.pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await asyncio.sleep(0.01)
            if self.breaks:
                writer.close()
                return
            writer.write(b"0\r\n\r\n")


async def read(upstream: Upstream, server: Server, calls: int = 1) -> list[bytes]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await server(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    lines: list[bytes] = []
    try:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/generate"
        for _ in range(calls):
            async with upstream.post(url, b"{}") as (status, found):
                assert status == 200
                lines += [line async for line in found]
    finally:
        listening.close()
        await upstream.aclose()
    return lines


async def test_lines_cut_anywhere_and_of_any_length(upstream: Upstream) -> None:
    long = b"data: " + b"7" * 900_000
    text = b"data: a\n\n" + long + b"\n\ndata: [DONE]\n\nrest"
    pieces = [text[start : start + 65_537] for start in range(0, len(text), 65_537)]
    assert [line for line in await read(upstream, Server([b"da", *pieces])) if line] == [
        b"dadata: a", long, b"data: [DONE]", b"rest",
    ]  # fmt: skip


async def test_connections_are_used_again(upstream: Upstream) -> None:
    server = Server([b"data: a\n\n"])
    await read(upstream, server, calls=5)
    assert server.connections == 1


async def test_a_break_in_the_middle_is_an_error(upstream: Upstream) -> None:
    with pytest.raises(EngineGoneError):
        await read(upstream, Server([b"data: a\n\n"], breaks=True))


async def test_nobody_there(upstream: Upstream) -> None:
    with pytest.raises(EngineGoneError):
        async with upstream.post("http://127.0.0.1:9/generate", b"{}"):
            pass
