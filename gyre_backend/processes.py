"""Processes of the backend: none outlives its parent, each says in one line when it serves."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn

from gyre_backend.corked import server_config
from gyre_sdk.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def die_with_parent(on_eof: Callable[[], None] | None = None) -> None:
    """Call once at a child's start. The parent holds the child's stdin open and never writes to it after the
    first line.

    When stdin ends, `on_eof` runs (default: SIGTERM to ourselves); if the process is still there 10 s later,
    it exits at once.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    threading.Thread(target=_watch, args=(on_eof,), name="gyre-lifeline", daemon=True).start()


def _watch(on_eof: Callable[[], None] | None) -> None:
    try:
        # Not sys.stdin: a thread that sits in its buffer's lock aborts the interpreter at exit.
        while os.read(0, 4096):
            pass
    except (OSError, ValueError):
        pass
    timer = threading.Timer(10.0, lambda: os._exit(1))
    timer.daemon = True
    timer.start()
    if on_eof is not None:
        on_eof()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def serve_until_parent_ends(app: Any, host: str, port: int) -> None:
    """Serve an ASGI app; print `{"ready": true, "url": ...}` once it listens. Ends at SIGTERM, SIGINT or the parent's end.

    Raises ConfigError when the address can't be bound.
    """
    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from error
    url = f"http://{host}:{listener.getsockname()[1]}"
    config = server_config(app, timeout_graceful_shutdown=5)
    server = Announcing(config, url)
    die_with_parent(lambda: setattr(server, "should_exit", True))
    server.run(sockets=[listener])


class Announcing(uvicorn.Server):
    """A server that prints its ready line when it has started."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        sys.stdout.write(msgspec.json.encode({"ready": True, "url": self._url}).decode() + "\n")
        sys.stdout.flush()
