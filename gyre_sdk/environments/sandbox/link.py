"""The runner's side of the keeper: starts it once per event loop's process, and talks to one box of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre_sdk.environments.sandbox.keeper import channel
from gyre_sdk.errors import SandboxError

_KEEPER = "import sys; sys.path.insert(0, sys.argv[1]); from keeper.main import serve; serve(int(sys.argv[2]))"


class _Keeper:
    """The one keeper of this process. It ends when this process does, however it does."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _KEEPER, str(Path(__file__).parent), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LANG": "C.UTF-8"},
                cwd="/",
            )
        self.control = ours
        self.owner = os.getpid()

    def usable(self) -> bool:
        """False after a fork of this process, or when the keeper has ended."""
        return self.owner == os.getpid() and self.process.poll() is None

    def open(self) -> socket.socket:
        """A new box's socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            channel.send(self.control, {"op": "box"}, [theirs.fileno()])
        return ours


_keeper: _Keeper | None = None
_lock = threading.Lock()


def open_box() -> socket.socket:
    """A socket to a fresh box, starting the keeper when there is none. Raises SandboxError."""
    global _keeper
    with _lock:
        try:
            if _keeper is None or not _keeper.usable():
                _keeper = _Keeper()
            return _keeper.open()
        except OSError as error:
            raise SandboxError(f"the sandbox keeper could not be started: {error}") from error


class Link:
    """Requests to one box and their answers. Used from one event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.setblocking(False)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(connection.fileno(), self._on_readable)
        self.answers: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self.exits: dict[int, asyncio.Future[int]] = {}
        self.closed = False
        self.init_died = False
        self._next = 1
        self.on_lost: Callable[[], None] | None = None

    async def ask(self, op: str, *, fds: list[int] | None = None, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """Send a request and wait for its first answer. Raises SandboxError."""
        _, answer = await self._send(op, fds, fields)
        return await answer

    async def run(self, what: str, *, fds: list[int] | None = None, **fields: Any) -> tuple[int, asyncio.Future[int]]:
        """Start a child; returns the request's id and the future of its exit code."""
        exit_code: asyncio.Future[int] = self.loop.create_future()
        request, answer = await self._send("run", fds, {"what": what, **fields}, exit_code)
        try:
            await answer
        except SandboxError:
            self.exits.pop(request, None)
            raise
        return request, exit_code

    async def listen(self, port: int = 0) -> tuple[socket.socket, int]:
        """A listening loopback socket of the sandbox's network, and its port."""
        reply, self._next = self._next, self._next + 1
        answer: asyncio.Future[tuple[dict[str, Any], list[int]]] = self.loop.create_future()
        self.answers[reply] = answer
        _, ended = await self.run("listen", reply=reply, port=port)
        waiting: set[asyncio.Future[Any]] = {answer, ended}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self.answers.pop(reply, None)
            raise SandboxError("no port could be opened in the sandbox's network")
        message, fds = await answer
        return socket.socket(fileno=fds[0]), message["port"]

    async def _send(
        self, op: str, fds: list[int] | None, fields: dict[str, Any], exit_code: asyncio.Future[int] | None = None
    ) -> tuple[int, asyncio.Future[tuple[dict[str, Any], list[int]]]]:
        if self.closed:
            raise SandboxError("the sandbox is not running")
        request, self._next = self._next, self._next + 1
        answer: asyncio.Future[tuple[dict[str, Any], list[int]]] = self.loop.create_future()
        self.answers[request] = answer
        if exit_code is not None:
            self.exits[request] = exit_code
        while True:
            try:
                channel.send(self.connection, {"id": request, "op": op, **fields}, fds)
                return request, answer
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError as error:
                self._lost(f"the sandbox's keeper is gone: {error}")
                raise SandboxError(f"the sandbox's keeper is gone: {error}") from error

    def _on_readable(self) -> None:
        while not self.closed:
            try:
                received = channel.receive(self.connection)
            except BlockingIOError:
                return
            except OSError:
                received = None
            if received is None:
                self._lost("the sandbox's keeper is gone")
                return
            self._dispatch(*received)

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> None:
        if message.get("dead"):
            self.init_died = True
            self._fail_exits("the sandbox's init was killed")
            return
        request = message["id"]
        if "exit" in message:
            future = self.exits.pop(request, None)
            if future is not None and not future.done():
                future.set_result(message["exit"])
            return
        answer = self.answers.pop(request, None)
        if answer is None or answer.done():
            for fd in fds:
                os.close(fd)
        elif "error" in message:
            answer.set_exception(SandboxError(message["error"]))
        else:
            answer.set_result((message, fds))

    def _fail_exits(self, why: str) -> None:
        for future in self.exits.values():
            if not future.done():
                future.set_exception(SandboxError(why))
                future.exception()
        self.exits.clear()

    def _lost(self, why: str) -> None:
        self.close()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(SandboxError(why))
                answer.exception()
        self.answers.clear()
        self._fail_exits(why)
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """Close our end; the box then ends by itself."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(ValueError):
                self.loop.remove_reader(self.connection.fileno())
            self.connection.close()
