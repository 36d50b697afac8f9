"""The router's connections to engines: one POST, its reply line by line. In a module of its own because it is the hot path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gyre_sdk.errors import EngineGoneError, MissingExtraError

if TYPE_CHECKING:
    import aiohttp

IDLE_S = 4.0
"""Engines close a connection that was idle for 5 s (uvicorn's default): ours is given up first, so that no call meets a closing one."""
CONNECT_S = 10.0
_JSON = {"content-type": "application/json"}


class Upstream:
    """Connections to all engines, used again. aiohttp rather than httpx: a third of its time per call."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            try:
                import aiohttp
            except ImportError as error:
                raise MissingExtraError("aiohttp", "backend") from error
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
            )
        return self._session

    @asynccontextmanager
    async def post(self, url: str, body: bytes) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """(status, the reply's lines). Raises EngineGoneError when there is no connection, or it breaks."""
        import aiohttp

        try:
            async with self._open().post(url, data=body, headers=_JSON) as answer:
                yield answer.status, _lines(answer.content)
        except aiohttp.ClientError as error:
            raise EngineGoneError(f"{type(error).__name__} {error}".rstrip()) from error

    async def aclose(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Without their ends; of any length (aiohttp's own line reader has a limit)."""
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
