"""A child that never outlives its parent: a kernel signal where there is one, and the end of stdin
everywhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

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
        while sys.stdin.buffer.read(4096):
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
