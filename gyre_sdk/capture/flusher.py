"""Group commit: one thread makes the logs of all executions durable, with one sync for all that is waiting.

A sync costs about the same for one file as for many bytes, but it costs that much *per file*. So when several
logs are waiting, their new bytes are written to the log files without a sync, and once more, all together, to
a shared journal that is synced. The journal is only read after a crash of the machine (a killed process loses
nothing it has written): then it completes the log files. It is emptied, after syncing the log files
themselves, whenever it has grown to 64 MiB, and removed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from gyre_sdk.errors import ConfigError, CorruptRecordError, StorageError
from gyre_sdk.wire import frame_bytes, next_frame

JOURNAL_BYTES = 64 * 2**20


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """These bytes belong at this offset of that file (relative to the journal's folder)."""

    path: str
    offset: int
    data: bytes


Notice = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


@dataclass(slots=True)
class Round:
    """What one log has to write now, and how it went."""

    log: Log
    path: Path
    file: int
    offset: int
    data: bytes
    frames: int
    error: OSError | None = None


class Log(Protocol):
    """A log as the flusher sees it; called from the flusher's thread."""

    def take(self) -> Round | None:
        """What is queued, or None."""
        ...

    def settle(self, done: Round) -> list[Notice]:
        """It is durable, or `done.error` says why not. Returns who is to be told, on which event loop."""
        ...


@dataclass(slots=True)
class FlushStats:
    """What the flusher did, for benchmarks and metrics."""

    records: int = 0
    bytes: int = 0
    syncs: int = 0
    sync_seconds: float = 0.0
    failures: int = 0


class Flusher:
    """The thread. `journal` is the shared journal's path (in the folder that holds the logs, or above them);
    without one every log is synced by itself. A context manager; `close` writes what is queued.

    A journal left by a crash is played into the log files first: create the flusher before opening logs.
    Raises StorageError.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self.stats = FlushStats()
        self._journal = _Journal(journal) if journal is not None else None
        self._dirty: dict[Log, None] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Flusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is queued, end the thread, remove the journal. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._journal is not None:
            self._journal.close()

    def schedule(self, log: Log) -> None:
        """There is something to write for `log`."""
        with self._wake:
            self._dirty[log] = None
            if self._thread is None or not self._thread.is_alive():
                self._closing = False
                self._thread = threading.Thread(target=self._run, name="gyre-wal", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._dirty and not self._closing:
                    self._wake.wait()
                if not self._dirty:
                    self._thread = None
                    return
                batch, self._dirty = list(self._dirty), {}
            self._flush([taken for log in batch if (taken := log.take()) is not None])

    def _flush(self, rounds: list[Round]) -> None:
        for item in rounds:
            try:
                write_at(item.file, item.offset, item.data)
            except OSError as error:
                item.error = error
        written = [item for item in rounds if item.error is None]
        started = time.perf_counter()
        shared = len(written) > 1 and self._journal is not None and self._journal.commit(written)
        self.stats.syncs += 1 if shared else len(written)
        if not shared:
            for item in written:
                try:
                    os.fdatasync(item.file)
                    if item.offset == 0:
                        sync_folder(item.path.parent)
                except OSError as error:
                    item.error = error
        self.stats.sync_seconds += time.perf_counter() - started
        notices: list[Notice] = []
        for item in rounds:
            if item.error is None:
                self.stats.records += item.frames
                self.stats.bytes += len(item.data)
            else:
                self.stats.failures += 1
                # Never leave a half-written frame behind the durable part; if even that fails, a reader finds
                # a torn tail.
                with contextlib.suppress(OSError):
                    os.ftruncate(item.file, item.offset)
            notices.extend(item.log.settle(item))
        _tell(notices)


def _tell(notices: list[Notice]) -> None:
    """Wake every loop once, however many wait: each wake-up is a system call that hands the interpreter lock
    over.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for loop, notice in notices:
        by_loop.setdefault(loop, []).append(notice)
    for loop, callbacks in by_loop.items():
        # A loop that was closed meanwhile has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_call_all, loop, callbacks)


def _call_all(loop: asyncio.AbstractEventLoop, callbacks: list[Callable[[], None]]) -> None:
    # One by one, so that a listener that raises does not keep the others waiting.
    for callback in callbacks:
        loop.call_soon(callback)


class _Journal:
    """The shared journal file: frames of `_Entry`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.parent.resolve()
        self._file = -1
        self._end = 0
        self._seq = 0
        self._unsynced: set[Path] = set()
        self._usable = True
        recover(path)

    def commit(self, rounds: list[Round]) -> bool:
        """Make all of `rounds` durable with one sync. False when that did not work: then nothing of it is in
        the journal.
        """
        if not self._usable:
            return False
        try:
            data = b"".join(self._frame(item) for item in rounds)
            if self._file < 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    # Another process in the same folder was first: each log is synced by itself then.
                    os.close(file)
                    self._usable = False
                    return False
                self._file = file
                os.ftruncate(self._file, 0)
                sync_folder(self.folder)
            write_at(self._file, self._end, data)
            os.fdatasync(self._file)
        except (OSError, ValueError):
            self._undo()
            return False
        self._end += len(data)
        self._unsynced.update(item.path for item in rounds)
        if self._end >= JOURNAL_BYTES:
            self._checkpoint()
        return True

    def close(self) -> None:
        """Sync the logs themselves and remove the file."""
        if self._file < 0:
            return
        if self._checkpoint():
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._file)
        self._file = -1

    def _frame(self, item: Round) -> bytes:
        relative = str(item.path.resolve().relative_to(self.folder))
        payload = msgspec.msgpack.encode(_Entry(relative, item.offset, item.data))
        frame = frame_bytes(payload, self._seq % 2**32)
        self._seq += 1
        return frame

    def _checkpoint(self) -> bool:
        """Sync every log the journal stands for, then empty it."""
        try:
            for path in sorted(self._unsynced):
                with contextlib.suppress(FileNotFoundError):
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        os.fsync(handle)
                    finally:
                        os.close(handle)
            for folder in {path.parent for path in self._unsynced}:
                with contextlib.suppress(FileNotFoundError):
                    sync_folder(folder)
            os.ftruncate(self._file, 0)
            os.fsync(self._file)
        except OSError:
            self._usable = False
            return False
        self._end = 0
        self._unsynced.clear()
        return True

    def _undo(self) -> None:
        try:
            if self._file >= 0:
                os.ftruncate(self._file, self._end)
        except OSError:
            self._usable = False


def recover(journal: Path) -> int:
    """Complete the log files from a journal that a crash left, then remove it. Returns how many entries were
    played.

    Raises StorageError when a file can't be written, ConfigError when a living process uses the journal.
    """
    if not journal.exists():
        return 0
    try:
        with journal.open("r+b") as held:
            _lock(journal, held.fileno())
            return _replay(journal, held.read())
    except OSError as error:
        raise StorageError(f"{journal}: can't be played into the logs: {error.strerror or error}") from error


def _lock(journal: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{journal.parent} is being recorded into by another process") from error


def _replay(journal: Path, data: bytes) -> int:
    folder = journal.parent.resolve()
    played, offset, touched = 0, 0, set[Path]()
    while True:
        try:
            frame = next_frame(data, offset)
        except CorruptRecordError:
            break  # the end of what was synced
        if frame is None:
            break
        offset = frame.end
        entry = msgspec.msgpack.decode(frame.payload, type=_Entry)
        target = (folder / entry.path).resolve()
        if target.is_relative_to(folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            _play(target, entry)
            touched.add(target)
            played += 1
    for path in touched:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    journal.unlink()
    return played


def _play(target: Path, entry: _Entry) -> None:
    handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # What lies beyond a gap can't have been acknowledged.
        if os.fstat(handle).st_size >= entry.offset:
            write_at(handle, entry.offset, entry.data)
    finally:
        os.close(handle)


def write_at(file: int, offset: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError, also for a write that makes no progress."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        if written == 0:
            raise OSError(28, "no space left on device")
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
