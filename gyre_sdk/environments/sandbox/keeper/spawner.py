"""A process that stays in the sandbox's control groups and forks the box's children there.

Joining a group costs a grace period of the kernel (8 to 30 ms); a child that is born in the group has nothing to join. The spawner does it
once, while the box still makes mounts. Its children are the box's (CLONE_PARENT): the box waits for them. It may be throttled, out of
process ids or killed for memory with the rest of the sandbox, so whoever asks it must be able to do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import socket
from collections.abc import Callable
from typing import Any

from . import cgroups, channel, kernel

_CLONE_PARENT = 0x00008000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_PATIENCE_S = 2.0
_libc = ctypes.PyDLL(None, use_errno=True)  # not CDLL: the interpreter's lock must be held where the child begins
Child = Callable[[dict[str, Any], list[int]], None]
"""What a child does with a message and its descriptors; never returns."""


def usable() -> bool:
    """Whether this machine's system call is known."""
    return platform.machine() in _SYS_CLONE


def _fork_for_parent() -> int:
    """fork(2), the child being our parent's. Only from a process with one thread."""
    number = _SYS_CLONE[platform.machine()]
    pid = _libc.syscall(ctypes.c_long(number), ctypes.c_ulong(_CLONE_PARENT | signal.SIGCHLD), 0, 0, 0, 0)
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(pid)


class Spawner:
    """The box's side."""

    def __init__(self, groups: list[str], child: Child, enter: Callable[[list[int]], None]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(_PATIENCE_S)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.connection.close()
                _serve(theirs, groups, child, enter)
            finally:
                os._exit(0)
        theirs.close()

    def spawn(self, message: dict[str, Any], fds: list[int]) -> int | None:
        """The pid of a new child that does `message`; None when the spawner can't, and never will again."""
        return self._ask({"do": "spawn", "message": message}, fds)

    def enter(self, fds: list[int]) -> None:
        """Hand over the namespaces' descriptors; children belong there from now on."""
        self._ask({"do": "enter"}, fds)

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int | None:
        if self.pid < 0:
            return None
        try:
            channel.send(self.connection, request, fds)
            answer = channel.receive(self.connection)
        except OSError:
            answer = None
        if answer is None or answer[0]["pid"] < 0:
            self.close()
            return None
        return int(answer[0]["pid"])

    def close(self) -> None:
        """End it. The box reaps it."""
        self.connection.close()
        if self.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = -1


def _serve(connection: socket.socket, groups: list[str], child: Child, enter: Callable[[list[int]], None]) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    cgroups.join(groups)
    while (received := channel.receive(connection)) is not None:
        request, fds = received
        pid = 0
        try:
            if request["do"] == "enter":
                enter(fds)
                fds = []
            else:
                pid = _fork_for_parent()
                if pid == 0:
                    connection.close()
                    child(request["message"], fds)
        except OSError:
            pid = -1
        channel.send(connection, {"pid": pid})
        for fd in fds:
            os.close(fd)
