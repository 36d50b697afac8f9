"""The sender: a tail of every log, posted to the backend while executions run.

Nothing is queued in memory but byte positions: frames are read from the log when they are sent, a few
megabytes at a time, so a backend that is gone for an hour costs disk, not memory. The backend says which
record it wants next; everything else follows from that: re-sending is harmless, and either side may die and
come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import anyio.to_thread
import httpx
import msgspec

from gyre_sdk.errors import ConfigError, CorruptRecordError, GyreError, StorageError
from gyre_sdk.wire import WalReader, payload_kind

MAX_BODY_BYTES = 4 * 2**20
MAX_WAIT_S = 5.0
LINGER_S = 0.1
"""Small news waits this long for company: a request costs more than many records ..."""
SMALL_REQUESTS_PER_S = 50
"""... and longer when many executions have some: about so many small requests are sent, whatever their number ..."""
MAX_LINGER_S = 1.0
"""... as long as no news waits longer than this."""
EAGER_BYTES = 256 * 2**10
"""What is larger goes at once."""


@dataclass(frozen=True, slots=True)
class SenderStatus:
    """Where the stream stands."""

    executions: int
    """Executions with records that are not acknowledged yet."""
    behind_bytes: int
    """Bytes on disk that are not acknowledged yet."""
    acknowledged: int
    """Records acknowledged so far, of all executions."""
    bytes_sent: int
    failures: int
    """Attempts that failed since the last one that worked."""
    last_error: str


class _Wanted(msgspec.Struct, frozen=True):
    want: int


class _Busy(Exception):
    """The backend is not there, or asks to wait."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _Tail:
    """One execution's log, as far as it was sent."""

    def __init__(self, execution: str, log: Path) -> None:
        self.execution = execution
        self.reader = WalReader(log)
        self.limit = 0
        self.greeted = False
        """Whether the backend has told what it wants."""
        self.sealed = False
        self.lingering = False
        self.error: GyreError | None = None

    @property
    def behind(self) -> int:
        return 0 if self.error is not None else max(0, self.limit - self.reader.offset)

    def read(self) -> bytes:
        """Whole frames up to the limit, at most one body full."""
        frames = []
        for frame in self.reader.frames(self.limit, MAX_BODY_BYTES):
            frames.append(frame.encoded())
            self.sealed = payload_kind(frame.payload) == "sealed"
        return b"".join(frames)


class FrameSender:
    """Streams logs to `url`/v1/frames. An async context manager; also a `RecordSink` for the gateway.

    `on_error` hears once of every execution whose stream can't go on (the others do), `on_done` of every sealed one that
    the backend has all of.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        parallel: int = 4,
        client: httpx.AsyncClient | None = None,
        on_error: Callable[[str, GyreError], None] = lambda execution, error: None,
        on_done: Callable[[str], None] = lambda execution: None,
    ) -> None:
        self._client = client or httpx.AsyncClient(timeout=httpx.Timeout(60.0, connect=5.0), trust_env=False)
        self._url = f"{url.rstrip('/')}/v1/frames"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
        self._parallel = parallel
        self._on_error = on_error
        self._on_done = on_done
        self._tails: dict[str, _Tail] = {}
        self._ready: asyncio.Queue[_Tail] = asyncio.Queue()
        self._queued: set[str] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._acknowledged = 0
        self._sent = 0
        self._failures = 0
        self._last_error = ""
        self._refused: ConfigError | None = None
        self._draining = False

    async def __aenter__(self) -> FrameSender:
        self._workers = [asyncio.create_task(self._work(), name=f"gyre-sender-{i}") for i in range(self._parallel)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._client.aclose()

    # -- the sink --------------------------------------------------------------------------------------------

    def opened(self, execution: str, log: Path) -> None:
        """Follow this log. Nothing is sent before `advanced` says what is on disk."""
        self._tails.setdefault(execution, _Tail(execution, log))

    def advanced(self, execution: str, seq: int, offset: int) -> None:
        """More of it is on disk."""
        tail = self._tails.get(execution)
        if tail is None or offset <= tail.limit:
            return
        tail.limit = offset
        if tail.behind >= EAGER_BYTES or self._draining:
            self._push(tail)
        elif not tail.lingering:
            tail.lingering = True
            asyncio.get_running_loop().call_later(self._linger_s(), self._push, tail)

    def resume(self, execution: str, log: Path, *, sealed: bool = False) -> None:
        """Send a log of an earlier process, as far as the backend lacks it; `sealed`: nothing will be added to it.

        Raises StorageError when it can't be read.
        """
        try:
            size = log.stat().st_size
        except OSError as error:
            raise StorageError(f"{log}: {error.strerror}") from error
        self.opened(execution, log)
        self._tails[execution].sealed = sealed
        self.advanced(execution, 0, size)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that is on disk now is acknowledged; False when `timeout_s` passed first.

        Raises ConfigError when the backend refuses us altogether.
        """
        self._draining = True
        for tail in self._tails.values():
            if tail.behind:
                self._push(tail)
        try:
            return await self._drained(timeout_s)
        finally:
            self._draining = False

    async def _drained(self, timeout_s: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(not self._settled(tail) for tail in self._tails.values()):
                    if self._refused is not None:
                        raise self._refused
                    changed = self._changed
                    await changed.wait()
                return True
        return False

    def status(self) -> SenderStatus:
        """Where the stream stands now."""
        behind = [tail.behind for tail in self._tails.values()]
        return SenderStatus(
            executions=sum(size > 0 for size in behind),
            behind_bytes=sum(behind),
            acknowledged=self._acknowledged,
            bytes_sent=self._sent,
            failures=self._failures,
            last_error=self._last_error,
        )

    # -- the workers
    # -------------------------------------------------------------------------------------------

    def _linger_s(self) -> float:
        return min(MAX_LINGER_S, max(LINGER_S, len(self._tails) / SMALL_REQUESTS_PER_S))

    def _settled(self, tail: _Tail) -> bool:
        return tail.error is not None or (tail.behind == 0 and tail.execution not in self._queued)

    def _push(self, tail: _Tail) -> None:
        tail.lingering = False
        if tail.execution not in self._queued and tail.error is None:
            self._queued.add(tail.execution)
            self._ready.put_nowait(tail)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _work(self) -> None:
        while True:
            tail = await self._ready.get()
            wait = 0.0
            try:
                await self._send(tail)
                self._failures = 0
            except _Busy as busy:
                self._failures += 1
                self._last_error = str(busy)
                backoff = min(MAX_WAIT_S, 0.05 * 2 ** min(self._failures, 10))
                wait = busy.wait_s if busy.wait_s is not None else backoff * random.uniform(0.5, 1.0)
                tail.greeted = False
            except GyreError as error:
                tail.error = error
                self._last_error = str(error)
                if isinstance(error, ConfigError):
                    self._refused = error
                self._on_error(tail.execution, error)
            if wait:
                await asyncio.sleep(wait)
            self._queued.discard(tail.execution)
            if tail.behind >= EAGER_BYTES or (tail.behind and (wait or self._draining)):
                self._push(tail)
            elif tail.behind and not tail.lingering:
                tail.lingering = True
                asyncio.get_running_loop().call_later(self._linger_s(), self._push, tail)
            elif tail.behind == 0 and tail.sealed:
                self._tails.pop(tail.execution, None)
                self._on_done(tail.execution)
            self._tell()

    async def _send(self, tail: _Tail) -> None:
        """Send until nothing is left. Raises _Busy, or a GyreError when this execution can't be streamed."""
        if not tail.greeted:
            await self._go_to(tail, await self._post(tail, 0, b""))
            tail.greeted = True
        while tail.behind:
            offset, first = tail.reader.offset, tail.reader.next_seq
            body = await anyio.to_thread.run_sync(tail.read)
            if not body:
                return
            end = tail.reader.next_seq
            try:
                want = await self._post(tail, first, body)
            except BaseException:  # cleans up and raises again
                # Read but not acknowledged: still to be sent.
                tail.reader.offset, tail.reader.next_seq, tail.sealed = offset, first, False
                raise
            self._acknowledged += max(0, min(want, end) - first)
            if want != end:
                await self._go_to(tail, want)

    async def _go_to(self, tail: _Tail, want: int) -> None:
        there = await anyio.to_thread.run_sync(tail.reader.skip_to, want, tail.limit)
        if not there:
            raise CorruptRecordError(
                f"the backend wants record {want} of execution {tail.execution}, but its log ends before: "
                "they are not of the same run"
            )

    async def _post(self, tail: _Tail, first: int, body: bytes) -> int:
        parameters: dict[str, str | int] = {"execution": tail.execution, "from": first}
        try:
            answer = await self._client.post(self._url, params=parameters, content=body, headers=self._headers)
        except httpx.TransportError as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error
        self._sent += len(body)
        if answer.status_code == 200:
            return msgspec.json.decode(answer.content, type=_Wanted).want
        text = f"the backend answered {answer.status_code} to records of {tail.execution}: {answer.text[:300]}"
        if answer.status_code in (401, 403, 404):
            raise ConfigError(text)
        if answer.status_code == 429 or answer.status_code >= 500:
            after = answer.headers.get("retry-after", "")
            raise _Busy(text, float(after) if after.replace(".", "", 1).isdigit() else None)
        raise CorruptRecordError(text)
