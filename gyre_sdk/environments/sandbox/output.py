"""Reading a command's output without ever blocking its writers, also those that outlive it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
from collections.abc import Callable
from typing import IO

from gyre_sdk.environments.sandbox.base import OUTPUT_LIMIT

_CHUNK = 65_536
_HARNESS_LIMIT = 64 << 20


class Drain:
    """Reads one pipe to its end. What a background service writes after its command ended is read and dropped."""

    def __init__(
        self,
        on_bytes: Callable[[bytes], None] | None = None,
        into: IO[bytes] | None = None,
        limit: int = OUTPUT_LIMIT,
        drop: bool = False,
    ) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)
        self.on_bytes = on_bytes
        self.into = into
        self.limit = limit if into is None else _HARNESS_LIMIT
        self.kept = bytearray()
        self.seen = 0
        self.detached = drop
        self.on_end: Callable[[Drain], None] = _nothing
        self.ended = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.read_end, self._on_readable)

    def handed_over(self) -> None:
        """The command has its copy of the write end."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _on_readable(self) -> None:
        try:
            data = os.read(self.read_end, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        if self.detached:
            return
        room = max(0, self.limit - self.seen)
        self.seen += len(data)
        kept = data[:room]
        if self.into is None:
            self.kept += kept
        elif kept:
            with contextlib.suppress(ValueError, OSError):
                self.into.write(kept)
                self.into.flush()
        if self.on_bytes is not None and kept:
            self.on_bytes(kept)

    @property
    def truncated(self) -> bool:
        """Whether something was dropped."""
        return self.seen > self.limit

    async def finish(self) -> None:
        """After the command's exit: take what is in the pipe, then only drop what its survivors still write."""
        self.handed_over()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 0.02)
        if not self.ended.is_set():
            with contextlib.suppress(OSError):
                for _ in range(256):
                    data = os.read(self.read_end, _CHUNK)
                    if not data:
                        break
                    self._take(data)
            self.detached = True

    def text(self) -> str:
        """What was kept, as text."""
        return self.kept.decode("utf-8", errors="replace")

    def close(self) -> None:
        """Stop reading."""
        self.handed_over()
        if self.read_end >= 0:
            self.loop.remove_reader(self.read_end)
            os.close(self.read_end)
            self.read_end = -1
        self.ended.set()
        self.on_end(self)


def _nothing(drain: Drain) -> None:
    """Nobody keeps count."""


def decoded(callback: Callable[[str], None]) -> Callable[[bytes], None]:
    """Give `callback` text, never half a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def on_bytes(data: bytes) -> None:
        text = decoder.decode(data)
        if text:
            callback(text)

    return on_bytes
