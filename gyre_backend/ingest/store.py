"""Frames of one execution on disk, in the WAL's own format: what was acknowledged survives us."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gyre_sdk.errors import StorageError
from gyre_sdk.wire import FILE_HEADER_BYTES, Frame, WalReader, file_header, repair


class FrameStore:
    """Appends frames to one file. Its methods block: call them from a worker thread, one at a time."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path = path
        self.sync = sync
        self.next_seq = 0
        self.offset = 0

    def load(self) -> Iterator[Frame]:
        """Cut a torn tail, then all frames that are there. Raises CorruptRecordError for damage,
        StorageError.
        """
        self.next_seq = self.offset = 0
        if not self.path.exists():
            return
        try:
            report = repair(self.path)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}") from error
        reader = WalReader(self.path)
        yield from reader.frames()
        self.next_seq, self.offset = report.frames, report.good_bytes

    def append(self, frames: bytes, count: int) -> None:
        """Make `count` frames durable. Raises StorageError; then the file is as before."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._write(handle, frames)
            except OSError:
                # If this fails too, the next load finds a torn tail and cuts it.
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, self.offset)
                raise
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}") from error
        self.offset = max(self.offset, FILE_HEADER_BYTES) + len(frames)
        self.next_seq += count

    def _write(self, handle: int, frames: bytes) -> None:
        if self.offset < FILE_HEADER_BYTES:
            frames = file_header() + frames
        view, at = memoryview(frames), self.offset
        while view:
            written = os.pwrite(handle, view, at)
            if written == 0:
                raise OSError(28, "no space left on device")
            view, at = view[written:], at + written
        if self.sync:
            os.fdatasync(handle)
            if self.offset == 0:
                folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
