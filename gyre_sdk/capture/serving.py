"""Serving an ASGI app on loopback inside a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import uvicorn

from gyre_sdk.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _Server(uvicorn.Server):
    """Without signal handlers: the process belongs to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve_app(app: ASGIApp, host: str, port: int, *, anywhere: bool = False) -> AsyncIterator[str]:
    """Serve an app; yields its base URL. Raises ConfigError when the port is taken or the address is no loopback one
    (unless `anywhere`: for an app that asks for a token and says so).
    """
    if not anywhere and host not in LOOPBACK:
        raise ConfigError(f"only loopback addresses are served, not {host}: keys travel in the clear")
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",  # it calls every stream that is broken on purpose an error
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=120,
        h11_max_incomplete_event_size=2**20,
    )
    server = _Server(config)
    task = asyncio.create_task(server._serve([listener]))
    try:
        while not server.started:
            if task.done():
                task.result()
                raise ConfigError("the server ended while starting")
            await asyncio.sleep(0.002)
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from error
    return listener
