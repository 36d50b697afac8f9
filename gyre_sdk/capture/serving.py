"""Serving an ASGI app on loopback inside a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import uvicorn

from gyre_sdk.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class Tls(msgspec.Struct, frozen=True):
    """Certificate chain and private key, as PEM files."""

    cert: str
    key: str

    def check(self) -> None:
        """Raises ConfigError when the pair can't be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"TLS: {self.cert} and {self.key} are no usable certificate and key: {error}") from error


LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _Server(uvicorn.Server):
    """Without signal handlers: the process belongs to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve_app(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    anywhere: bool = False,
    tls: Tls | None = None,
    listener: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Serve an app; yields its base URL. Raises ConfigError when the port is taken, the certificate can't be read, or
    the address is no loopback one (unless `tls` is given; or `anywhere`: for an app that asks for a token and says so).

    listener: an open listening socket to serve instead of one of our own.
    """
    if not anywhere and tls is None and host not in LOOPBACK:
        raise ConfigError(
            f"only loopback addresses are served without TLS, not {host}: keys would travel in the clear; "
            "give a certificate and its key"
        )
    if tls is not None:
        tls.check()
    listener = listener or listen(host, port)
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
        ssl_certfile=tls.cert if tls is not None else None,
        ssl_keyfile=tls.key if tls is not None else None,
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
        yield f"{'http' if tls is None else 'https'}://{name}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError."""
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
