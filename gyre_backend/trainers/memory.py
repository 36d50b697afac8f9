"""Keep freed memory on a CPU: a training step asks for the same gigabytes again and again."""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what glibc takes at most on 64 bits
_MOST = (1 << 31) - 1
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def keep_freed_memory() -> bool:
    """Tell glibc's malloc not to give freed memory back to the kernel; True when it took that.

    Activations are freed and allocated anew in every micro-step. By default glibc returns them, and the kernel zeroes each page
    again on its next use: a tenth of the time of a step over few, wide micro-steps. The process keeps the size of its largest step.
    Nothing is done where the environment sets malloc itself, or with another C library.
    """
    if any(name in os.environ for name in _OWN_SETTINGS):
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _MOST))
    return False
