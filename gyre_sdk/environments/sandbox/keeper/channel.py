"""Messages between runner and keeper: JSON in one packet of a SOCK_SEQPACKET socket, with file descriptors."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

_INLINE = 60_000
_MAX_FDS = 16
_BUFFER = 65_536


def send(connection: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message. A long one travels in a memory file whose descriptor comes first."""
    body = json.dumps(message).encode()
    handed = list(fds or [])
    if len(body) <= _INLINE:
        socket.send_fds(connection, [b"j" + body], handed)
        return
    memory = os.memfd_create("gyre-message")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(body)
        socket.send_fds(connection, [b"m"], [memory, *handed])
    finally:
        os.close(memory)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its descriptors; None when the other side is gone. Raises BlockingIOError."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, _BUFFER, _MAX_FDS)
    except ConnectionResetError:
        return None
    if not data:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    if data[:1] == b"m":
        with open(fds.pop(0), "rb") as file:
            file.seek(0)
            return json.loads(file.read()), fds
    return json.loads(data[1:]), fds
