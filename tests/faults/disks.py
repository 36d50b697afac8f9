"""A disk that can be slow, full, read-only or broken: stands in for the calls that the log makes."""

from __future__ import annotations

import errno
import os
import time

import pytest


class Disk:
    """`room`: bytes until it is full; `error`: errno of every write and sync; `sync_s`: seconds that a sync takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.error: int | None = None
        self.sync_s = 0.0
        self._pwrite, self._fdatasync, self._open = os.pwrite, os.fdatasync, os.open
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path: str, flags: int, *more: int, **keywords: int) -> int:
        if self.error is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).endswith(".gyre"):
            raise OSError(self.error, os.strerror(self.error))
        return self._open(path, flags, *more, **keywords)

    def pwrite(self, file: int, data: memoryview, offset: int) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        if self.room is None:
            return self._pwrite(file, data, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(file, data[: self.room], offset)
        self.room -= written
        return written

    def fdatasync(self, file: int) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        time.sleep(self.sync_s)
        self._fdatasync(file)
