"""uvicorn with one write per turn of the event loop: head, body and end of a reply leave together when they were made together.

uvicorn writes each on its own. A write is a system call and, without Nagle's algorithm, a packet; a short reply costs four.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST_KEPT = 64 << 10
"""Bytes."""


class _Corked:
    """A transport that keeps what is written until the present turn of the loop is over. Everything else goes straight through."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._kept: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Soon; at once when it is much, so that a slow reader is felt."""
        if not self._kept:
            self._loop.call_soon(self._flush)
        self._kept.append(data)
        self._size += len(data)
        if self._size >= MOST_KEPT:
            self._flush()

    def _flush(self) -> None:
        kept, self._kept, self._size = self._kept, [], 0
        if kept and not self._transport.is_closing():
            self._transport.write(kept[0] if len(kept) == 1 else b"".join(kept))

    def close(self) -> None:
        """After what is kept."""
        self._flush()
        self._transport.close()


class CorkedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol (by httptools when that is installed, else by h11) over such a transport."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        super().connection_made(_Corked(transport, asyncio.get_running_loop()))


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """How the backend serves: quiet, no lifespan, no web sockets, corked. `options` are uvicorn's own."""
    return uvicorn.Config(
        app, **{"log_level": "warning", "lifespan": "off", "ws": "none", "http": CorkedProtocol, **options}
    )
