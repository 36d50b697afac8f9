"""The Mooncake Transfer Engine as a transport: peers read each other's registered memory, by TCP or RDMA."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from functools import partial
from typing import Any

from gyre_backend.errors import WeightsError
from gyre_backend.weights.manifest import CHUNK_BYTES
from gyre_backend.weights.regions import Region
from gyre_backend.weights.transport import ReadRange, check_inside, in_thread
from gyre_sdk.errors import MissingExtraError

MAX_DESCRIPTORS = 1000
"""Descriptors per batch. One peer's queue takes about 2000 and then refuses the next calls too."""
GRACE_S = 2.0
ATTEMPTS = 2


class RangeTable:
    """Our own table of registered memory: over TCP the library accepts unregistered local memory, over RDMA
    it would not.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._users: dict[int, int] = {}

    def add(self, ptr: int, nbytes: int) -> bool:
        """True when the range is new and must be registered; a second user of the same range is counted."""
        if self._sizes.get(ptr) == nbytes:
            self._users[ptr] += 1
            return False
        position = bisect_right(self._starts, ptr)
        before = self._starts[position - 1] if position else None
        after = self._starts[position] if position < len(self._starts) else None
        if (before is not None and before + self._sizes[before] > ptr) or (after is not None and ptr + nbytes > after):
            raise WeightsError(f"the range {ptr:#x}+{nbytes} overlaps one that is registered")
        insort(self._starts, ptr)
        self._sizes[ptr], self._users[ptr] = nbytes, 1
        return True

    def remove(self, ptr: int) -> bool:
        """True when the last user of the range has gone and it must be unregistered."""
        if ptr not in self._users:
            return False
        self._users[ptr] -= 1
        if self._users[ptr]:
            return False
        self._starts.remove(ptr)
        del self._sizes[ptr], self._users[ptr]
        return True

    def covers(self, ptr: int, nbytes: int) -> bool:
        """Whether the range lies inside one registered range."""
        position = bisect_right(self._starts, ptr)
        if not position:
            return False
        start = self._starts[position - 1]
        return ptr + nbytes <= start + self._sizes[start]

    @property
    def starts(self) -> list[int]:
        """Start addresses, in order."""
        return list(self._starts)


class _Engine:
    """One engine with its table."""

    def __init__(self, host: str, protocol: str, device: str) -> None:
        self.raw = _transfer_engine()
        self.table = RangeTable()
        code = self.raw.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise WeightsError(
                f"Mooncake could not start (protocol {protocol!r}, device {device!r}, code {code}); "
                "its reason is on stderr"
            )
        self.session = f"{host}:{self.raw.get_rpc_port()}"

    def register(self, ptr: int, nbytes: int) -> None:
        if nbytes and self.table.add(ptr, nbytes) and self.raw.register_memory(ptr, nbytes) != 0:
            self.table.remove(ptr)
            raise WeightsError(f"Mooncake could not register {nbytes} bytes at {ptr:#x}")

    def unregister(self, ptr: int) -> None:
        if self.table.remove(ptr):
            self.raw.unregister_memory(ptr)


class MooncakeTransport:
    """Two engines per process: one serves, one reads. A reader that fails or hangs is replaced; the served
    memory is not touched by that.
    """

    name = "mooncake"

    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp", device: str = "") -> None:
        self._arguments = (host, protocol, device)
        self._server = _Engine(*self._arguments)
        self._reader: _Engine | None = None
        self._lock = threading.Lock()
        self._abandoned: list[tuple[_Engine, Region]] = []

    @property
    def session(self) -> str:
        """`host:port` under which peers read our memory."""
        return self._server.session

    @property
    def timeout_s(self) -> float:
        """Seconds after which the library itself gives a stopped peer up (MC_TRANSFER_TIMEOUT)."""
        return max(5.0, float(os.environ.get("MC_TRANSFER_TIMEOUT", "30")))

    def expose(self, regions: Sequence[Region], version: int) -> tuple[str, list[int]]:
        """Register the regions with the serving engine; idempotent per address."""
        with self._lock:
            for region in regions:
                self._server.register(region.ptr, region.nbytes)
        return self._server.session, [region.ptr for region in regions]

    def withdraw(self, session: str, regions: Sequence[Region]) -> None:
        """Unregister; reads that come later fail."""
        with self._lock:
            for region in regions:
                self._server.unregister(region.ptr)

    def read(self, session: str, ranges: Sequence[ReadRange], target: Region, deadline_s: float) -> None:
        """Read ranges of a peer's memory into `target`, in batches of at most MAX_DESCRIPTORS.

        A failed batch is tried once more on a new engine (the old one's queue may be full of what failed). A
        read that is not back after
        the deadline is abandoned together with its engine and its target, which is kept alive: a late write
        must not land elsewhere.
        """
        for part in ranges:
            check_inside(part, target)
        pieces = list(_pieces(ranges))
        deadline_s = max(deadline_s, self.timeout_s + GRACE_S)
        for attempt in range(ATTEMPTS):
            engine = self._take_reader()
            engine.register(target.ptr, target.nbytes)
            try:
                in_thread(partial(_read_batches, engine, session, pieces), deadline_s, f"the read from {session}")
            except _Refused as error:
                del engine  # its queue may still hold what failed; nothing is in flight in it
                if attempt == ATTEMPTS - 1:
                    raise WeightsError(f"the read from {session} failed (code {error.code})") from error
            except WeightsError:
                self._abandoned.append((engine, target))
                raise
            else:
                engine.unregister(target.ptr)
                self._give_back(engine)
                return

    def _take_reader(self) -> _Engine:
        with self._lock:
            engine, self._reader = self._reader, None
        return engine or _Engine(*self._arguments)

    def _give_back(self, engine: _Engine) -> None:
        with self._lock:
            if self._reader is None:
                self._reader = engine

    def close(self) -> None:
        """Unregister everything that is served."""
        with self._lock:
            for ptr in self._server.table.starts:
                self._server.raw.unregister_memory(ptr)
            self._server.table = RangeTable()
            self._reader = None


class _Refused(WeightsError):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def _pieces(ranges: Sequence[ReadRange]) -> list[ReadRange]:
    """Cut into chunks of at most CHUNK_BYTES."""
    return [
        ReadRange(part.remote + start, part.local + start, min(CHUNK_BYTES, part.nbytes - start))
        for part in ranges
        for start in range(0, part.nbytes, CHUNK_BYTES)
    ]


def _read_batches(engine: _Engine, session: str, pieces: Sequence[ReadRange]) -> None:
    for start in range(0, len(pieces), MAX_DESCRIPTORS):
        batch = pieces[start : start + MAX_DESCRIPTORS]
        for part in batch:
            if not engine.table.covers(part.local, part.nbytes):
                raise WeightsError("a read into memory that is not registered")
        code = engine.raw.batch_transfer_sync_read(
            session, [p.local for p in batch], [p.remote for p in batch], [p.nbytes for p in batch]
        )
        if code != 0:
            raise _Refused(code)


def _transfer_engine() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        if "libibverbs" in str(error) or "libnuma" in str(error):
            raise WeightsError(
                f"Mooncake needs a system library: {error} (apt-get install libibverbs1 libnuma1)"
            ) from error
        raise MissingExtraError("mooncake-transfer-engine-non-cuda", "mooncake") from error
    return TransferEngine()
