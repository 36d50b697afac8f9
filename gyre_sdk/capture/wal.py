"""The write-ahead log: one append-only file per execution, made durable by one thread for all of them.

`append` numbers and queues a record and never blocks; `durable(seq)` waits until it is on disk. The flusher
thread takes whatever was queued since its last round: all calls that wait share one sync (see `flusher`).

When a write fails (disk full, read-only, I/O error) the file is cut back to what is known to be durable,
everyone who waits gets a StorageError, and the records stay queued: the next append tries again. So the file
is always a prefix of what was appended, nothing half-written is ever acknowledged, and when there is space
again nothing is missing.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from gyre_sdk.capture.flusher import Flusher, FlushStats, Notice, Round
from gyre_sdk.errors import ConfigError, StorageError
from gyre_sdk.wire import FILE_HEADER_BYTES, WalReader, WalReport, encode, file_header, repair, verify
from gyre_sdk.wire.records import Record

MAX_QUEUED_BYTES = 256 * 2**20
"""An execution whose disk takes nothing refuses records beyond this."""

DurableCallback = Callable[[int, int], None]


class Wal:
    """The writer of one execution's log. All methods but `take` and `settle` belong to the event loop's
    thread.
    """

    def __init__(self, path: Path, flusher: Flusher, file: int, next_seq: int, offset: int, head: bytes) -> None:
        self.path = path
        self.next_seq = next_seq
        """Number the next record will get."""
        self.durable_seq = next_seq
        """All records before this one are on disk ..."""
        self.durable_offset = offset
        """... and end at this byte."""
        self.error: StorageError | None = None
        """Why the last attempt to write failed; None when it worked."""
        self._flusher = flusher
        self._file = file
        self._lock = threading.Lock()
        self._queued: deque[bytes] = deque([head] if head else [])
        self._queued_bytes = len(head)
        self._unnumbered = 1 if head else 0
        self._waiters: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._listeners: list[tuple[asyncio.AbstractEventLoop, DurableCallback]] = []
        self._closed = False

    @classmethod
    def create(cls, path: Path, flusher: Flusher) -> Wal:
        """Begin a new log. Raises ConfigError when the file exists, StorageError when it can't be made."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():
                raise ConfigError(f"{path} exists already: a log is never overwritten") from error
            raise _storage_error(path, error) from error
        _take_lock(path, file)
        wal = cls(path, flusher, file, 0, 0, file_header())
        flusher.schedule(wal)
        return wal

    @classmethod
    def open(cls, path: Path, flusher: Flusher) -> tuple[Wal, WalReport]:
        """Go on with a log after a restart: a torn tail is cut (and kept beside it); the report says what was
        found.

        Raises CorruptRecordError for damage that is no torn tail, ConfigError when another process writes it,
        StorageError.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _storage_error(path, error) from error
        _take_lock(path, file)
        try:
            report = repair(path)
            if report.good_bytes < FILE_HEADER_BYTES:
                os.ftruncate(file, 0)
                wal = cls(path, flusher, file, 0, 0, file_header())
                flusher.schedule(wal)
                return wal, report
        except OSError as error:
            os.close(file)
            raise _storage_error(path, error) from error
        except BaseException:  # cleans up and raises again
            os.close(file)
            raise
        return cls(path, flusher, file, report.frames, report.good_bytes, b""), report

    # -- writing -------------------------------------------------------------------------------------------

    def append(self, record: Record) -> int:
        """Number and queue a record; returns its seq at once.

        Raises CorruptRecordError for a record that isn't well-formed, StorageError when the log is closed or
        too much is queued.
        """
        if self._closed:
            raise StorageError(f"{self.path} is closed")
        if self._queued_bytes > MAX_QUEUED_BYTES:
            raise self.error or StorageError(
                f"{self.path}: the disk is too slow, {self._queued_bytes >> 20} MiB are queued"
            )
        frame = encode(record, self.next_seq)
        seq = self.next_seq
        with self._lock:
            self.next_seq += 1
            self._queued.append(frame)
            self._queued_bytes += len(frame)
        self._flusher.schedule(self)
        return seq

    async def durable(self, seq: int) -> None:
        """Wait until record `seq` is on disk. Raises StorageError when the attempt to write it fails (it
        stays queued).
        """
        if seq < self.durable_seq:
            return
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            if seq < self.durable_seq:
                return
            self._waiters.append((seq, loop, future))
            failed = self.error is not None
        if failed:
            # A record that is still queued after a failure is tried again for whoever waits for it.
            self._flusher.schedule(self)
        await future

    async def write(self, record: Record) -> int:
        """`append`, then `durable`."""
        seq = self.append(record)
        await self.durable(seq)
        return seq

    def listen(self, callback: DurableCallback) -> None:
        """Call `callback(durable_seq, durable_offset)` on this event loop whenever more is on disk."""
        self._listeners.append((asyncio.get_running_loop(), callback))

    async def close(self) -> None:
        """Write what is queued, then close the file. Raises StorageError (the file is closed all the same).
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self.durable_seq < self.next_seq or self._queued:
                await self.durable(self.next_seq - 1)
        finally:
            with self._lock:
                file, self._file = self._file, -1
            os.close(file)

    # -- the flusher's side --------------------------------------------------------------------------------

    def take(self) -> Round | None:
        """What is queued now; called by the flusher."""
        with self._lock:
            if not self._queued or self._file < 0:
                return None
            data = b"".join(self._queued)
            return Round(self, self.path, self._file, self.durable_offset, data, len(self._queued))

    def settle(self, done: Round) -> list[Notice]:
        """What was taken is durable, or failed and stays queued; called by the flusher."""
        error = None if done.error is None else _storage_error(self.path, done.error)
        with self._lock:
            self.error = error
            if error is None:
                for _ in range(done.frames):
                    self._queued.popleft()
                self._queued_bytes -= len(done.data)
                self.durable_seq += done.frames - self._unnumbered
                self._unnumbered = 0
                self.durable_offset += len(done.data)
            ready = [w for w in self._waiters if error is not None or w[0] < self.durable_seq]
            self._waiters = [w for w in self._waiters if error is None and w[0] >= self.durable_seq]
            told = (self.durable_seq, self.durable_offset)
        notices: list[Notice] = [(loop, partial(_settle, future, error)) for _, loop, future in ready]
        if error is None:
            notices.extend((loop, partial(callback, *told)) for loop, callback in self._listeners)
        return notices


def read_records(path: Path) -> Iterator[Record]:
    """All whole records of a log, also of one that is being written or was cut off. Raises CorruptRecordError
    for damage.
    """
    for frame in WalReader(path).frames():
        yield frame.record()


def _settle(future: asyncio.Future[None], error: StorageError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _take_lock(path: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise ConfigError(f"{path} is being written by another process") from error


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: {error.strerror or error}: nothing more can be recorded there")


__all__ = ["FlushStats", "Flusher", "Wal", "WalReader", "WalReport", "read_records", "repair", "verify"]
