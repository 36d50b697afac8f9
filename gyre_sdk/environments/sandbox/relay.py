"""Connections from a sandbox's loopback to a port out here. The listening socket was opened in the sandbox's network namespace and
handed over as a descriptor, so nothing of it runs inside and nothing in the sandbox can keep it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

_MAX_CONNECTIONS = 256
_CHUNK = 65_536
Target = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]
]


class Relay:
    """Serves one listening socket until closed."""

    def __init__(self, listener: socket.socket, target: Target) -> None:
        self.listener = listener
        self.target = target
        self.server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accept from now on."""
        self.server = await asyncio.start_server(self._serve, sock=self.listener, limit=_CHUNK)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self.tasks) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self.tasks.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # either side went away
        except asyncio.CancelledError:
            if self.server is not None and self.server.is_serving():
                raise
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = await self.target(reader, writer)
        if opened is None:
            return
        far_reader, far_writer = opened
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer))
                group.create_task(_pump(far_reader, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            far_writer.transport.abort()

    async def close(self) -> None:
        """Stop accepting and cut what is open."""
        if self.server is not None:
            self.server.close()
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=2)
        with contextlib.suppress(OSError):
            self.listener.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()


def to_port(port: int) -> Target:
    """Every connection goes to 127.0.0.1:`port`."""

    async def connect(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK)

    return connect
