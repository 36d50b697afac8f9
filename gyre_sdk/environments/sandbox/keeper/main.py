"""The keeper's loop: fork one box per sandbox. It ends, and with it every box, when the runner's end of its socket closes."""

from __future__ import annotations

import os
import signal
import socket

from . import channel
from .box import Box


def serve(fd: int) -> None:
    """Fork a box for each descriptor that arrives, until the runner is gone."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (received := channel.receive(control)) is not None:
        _, fds = received
        if os.fork() == 0:
            control.close()
            code = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                code = Box(socket.socket(fileno=fds[0])).run()
            finally:
                os._exit(code)
        for handed in fds:
            os.close(handed)
