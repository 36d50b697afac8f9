"""Memory that was freed goes back to the system.

Requests of long contexts come and go as large blocks, between small ones that stay; the C library keeps what is free in
between for itself, more than all that the graphs hold.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Callable

GIVE_BACK_S = 30.0
"""From one time to the next."""


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # another C library than glibc: nothing to ask for
    return found


def give_back() -> None:
    """Return free memory to the system; takes milliseconds, without the interpreter's lock."""
    trim = _trim()
    if trim is not None:
        trim(0)


async def give_back_for_ever() -> None:
    """Do so every `GIVE_BACK_S`, beside the event loop."""
    while True:
        await asyncio.sleep(GIVE_BACK_S)
        await asyncio.to_thread(give_back)


__all__ = ["GIVE_BACK_S", "give_back", "give_back_for_ever"]
