"""The ingest: for every execution the next record it wants, the frames it has, and the graph they fold
into.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from gyre_backend.errors import IngestError
from gyre_backend.ingest.store import FrameStore
from gyre_sdk.errors import CorruptRecordError, GraphError, StorageError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import iter_frames
from gyre_sdk.wire.records import Opened, Record

_SAFE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_SUFFIX = ".gyre"


@dataclass(slots=True)
class IngestStats:
    """What came in since the start."""

    records: int = 0
    duplicates: int = 0
    bytes: int = 0
    gaps: int = 0
    refused: int = 0
    sealed: int = 0


class _Execution:
    def __init__(self, store: FrameStore) -> None:
        self.store = store
        self.lock = asyncio.Lock()
        self.graph: BranchGraph | None = None
        """None while it is on disk only."""
        self.loaded = False
        """Whether the store knows what is on disk."""
        self.sealed = False


class Ingest:
    """Folds frames into branch graphs. Belongs to one event loop; disk work happens in worker threads.

    `admit(opened)` may raise IngestError to refuse an execution; `on_opened(graph)` and `on_sealed(graph)`
    are called on the event loop, after what they tell of is on disk, once per process (a restarted service
    learns of older ones from `resume`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        admit: Callable[[Opened], None] = lambda opened: None,
        on_opened: Callable[[BranchGraph], None] = lambda graph: None,
        on_sealed: Callable[[BranchGraph], None] = lambda graph: None,
        sync: bool = True,
    ) -> None:
        self.directory = directory
        self.stats = IngestStats()
        self._admit = admit
        self._on_opened = on_opened
        self._on_sealed = on_sealed
        self._sync = sync
        self._executions: dict[str, _Execution] = {}

    async def resume(self, wanted: Callable[[str], bool] = lambda execution: True) -> dict[str, BranchGraph]:
        """Read what an earlier process acknowledged: the graphs, sealed or not, by execution. Calls no
        callback. Executions that are not `wanted` (trained already, say) stay on disk, and `graph` reads them
        when asked.

        Raises CorruptRecordError for a damaged file, StorageError when the folder can't be made or read.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = sorted(path.stem for path in self.directory.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise StorageError(f"{self.directory}: {error.strerror}") from error
        graphs = {}
        for name in filter(wanted, names):
            graphs[name] = await self._graph(self._entry(name))
        return {name: graph for name, graph in graphs.items() if graph.opened is not None}

    async def receive(self, execution: str, body: bytes) -> int:
        """Take consecutive frames (any start); returns the number of the record that is wanted next.

        Known frames are skipped; frames behind a gap are not taken. Raises IngestError for an execution that
        is not admitted and for frames that are damaged or don't fit, StorageError when they can't be kept:
        then nothing of `body` was taken.
        """
        entry = self._entry(execution)
        async with entry.lock:
            wanted = await self._wanted(entry)
            records, raw, skipped = await self._new_records(body, wanted)
            self.stats.duplicates += skipped
            if not records:
                return wanted
            graph = await self._graph(entry)
            self._fold(execution, entry, graph, records)
            # A request that is cancelled now must not leave frames on disk that nobody was told of.
            with anyio.CancelScope(shield=True):
                await self._keep(entry, graph, raw, len(records))
            return entry.store.next_seq

    async def _keep(self, entry: _Execution, graph: BranchGraph, raw: bytes, count: int) -> None:
        first = entry.store.next_seq == 0
        try:
            await anyio.to_thread.run_sync(entry.store.append, raw, count)
        except StorageError:
            entry.graph = None  # ahead of the disk: read it again when it is needed
            raise
        self.stats.records += count
        self.stats.bytes += len(raw)
        if first:
            self._on_opened(graph)
        if graph.sealed is not None and not entry.sealed:
            entry.sealed = True
            self.stats.sealed += 1
            self._on_sealed(graph)

    async def want(self, execution: str) -> int:
        """Number of the next record of this execution."""
        entry = self._entry(execution)
        async with entry.lock:
            return await self._wanted(entry)

    async def graph(self, execution: str) -> BranchGraph:
        """The graph so far. Raises IngestError when nothing is known of the execution."""
        entry = self._entry(execution)
        async with entry.lock:
            graph = await self._graph(entry)
        if graph.opened is None:
            raise IngestError(f"no execution {execution}", status=404)
        return graph

    def live_graph(self, execution: str) -> BranchGraph | None:
        """The graph if it is in memory."""
        entry = self._executions.get(execution)
        return None if entry is None else entry.graph

    def forget(self, execution: str) -> None:
        """Let go of the graph's memory; the frames stay on disk, and `graph` reads them again."""
        entry = self._executions.get(execution)
        if entry is not None and not entry.lock.locked():
            entry.graph = None

    def executions(self) -> list[str]:
        """Executions whose graph is in memory."""
        return sorted(name for name, entry in self._executions.items() if entry.graph is not None)

    # -- inside
    # ------------------------------------------------------------------------------------------------

    def _entry(self, execution: str) -> _Execution:
        if not _SAFE_ID.fullmatch(execution):
            raise IngestError("an execution's id holds only letters, digits, - and _", status=400)
        entry = self._executions.get(execution)
        if entry is None:
            store = FrameStore(self.directory / f"{execution}{_SUFFIX}", sync=self._sync)
            entry = self._executions[execution] = _Execution(store)
        return entry

    async def _wanted(self, entry: _Execution) -> int:
        if not entry.loaded:
            await self._graph(entry)
        return entry.store.next_seq

    async def _graph(self, entry: _Execution) -> BranchGraph:
        """The entry's graph, read from disk when it is not in memory."""
        if entry.graph is None:

            def load() -> BranchGraph:
                entry.store.path.parent.mkdir(parents=True, exist_ok=True)
                return BranchGraph.replay(frame.record() for frame in entry.store.load())

            try:
                entry.graph = await anyio.to_thread.run_sync(load)
            except OSError as error:
                raise StorageError(f"{entry.store.path}: {error.strerror}") from error
            entry.loaded = True
            entry.sealed = entry.graph.sealed is not None
        return entry.graph

    async def _new_records(self, body: bytes, wanted: int) -> tuple[list[Record], bytes, int]:
        """(records not known yet, their bytes, how many were known). Empty behind a gap."""
        if len(body) > 2**17:
            return await anyio.to_thread.run_sync(self._parse, body, wanted)
        return self._parse(body, wanted)

    def _parse(self, body: bytes, wanted: int) -> tuple[list[Record], bytes, int]:
        records: list[Record] = []
        skipped, start, end, expected = 0, 0, 0, None
        try:
            for frame in iter_frames(body):
                if expected is not None and frame.seq != expected:
                    raise IngestError(f"record {frame.seq} follows {expected - 1} in one body")
                if expected is None and frame.seq > wanted:
                    self.stats.gaps += 1
                    return [], b"", 0
                expected, end = frame.seq + 1, frame.end
                if frame.seq < wanted:
                    skipped, start = skipped + 1, frame.end
                else:
                    records.append(frame.record())
        except CorruptRecordError as error:
            self.stats.refused += 1
            raise IngestError(f"damaged frames: {error}") from error
        if end != len(body):
            self.stats.refused += 1
            raise IngestError(f"the body ends inside a frame, at byte {end} of {len(body)}")
        return records, body[start:], skipped

    def _fold(self, execution: str, entry: _Execution, graph: BranchGraph, records: list[Record]) -> None:
        try:
            for record in records:
                if isinstance(record, Opened):
                    if record.execution != execution:
                        raise IngestError(f"records of {record.execution!r} were sent as those of {execution!r}")
                    self._admit(record)
                graph.apply(record)
        except (GraphError, IngestError) as error:
            # Some were applied before the bad one: what is on disk is the truth.
            entry.graph = None
            self.stats.refused += 1
            raise error if isinstance(error, IngestError) else IngestError(str(error)) from error
