"""Log → sender → ingest: everything arrives once, in order, whatever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gyre_backend.errors import IngestError
from gyre_backend.ingest import Ingest, ingest_routes
from gyre_sdk.capture.wal import Flusher, Wal, read_records, verify
from gyre_sdk.errors import ConfigError, CorruptRecordError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.stream import FrameSender
from gyre_sdk.wire import encode, pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Intent, Opened, Outcome, Record, Result, Sealed, Span

pytestmark = pytest.mark.anyio


def program(execution: str, calls: int, tokens: int = 50) -> list[Record]:
    """A linear execution."""
    records: list[Record] = [Opened(execution=execution, at=0.0)]
    length = 0
    for call in range(calls):
        ids = np.arange(tokens) + call
        records.append(
            Intent(call=call, at=1.0, dialect="chat", base_call=call - 1, base_len=length, delta=pack_ids(ids))
        )
        spans = (Span(0, 0, tokens),)
        logprobs = pack_floats(np.zeros(tokens))
        records.append(
            Result(call=call, at=2.0, ids=pack_ids(ids + 7), logprobs=logprobs, versions=spans, finish="stop")
        )
        records.append(Delivered(call=call, at=3.0, complete=True))
        length += 2 * tokens
    return [*records, Sealed(at=9.0, outcome=Outcome(status="completed", reward=1.0, valid=True))]


def authorize(request: Request) -> Response | None:
    if request.headers.get("authorization") == "Bearer secret":
        return None
    return JSONResponse({"error": "no"}, status_code=401)


def client_for(ingest: Ingest) -> httpx.AsyncClient:
    app = Starlette(routes=ingest_routes(ingest, authorize=authorize))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app))


async def log_of(folder: Path, flusher: Flusher, records: list[Record], sender: FrameSender | None = None) -> Wal:
    opened = records[0]
    assert isinstance(opened, Opened)
    wal = Wal.create(folder / opened.execution / "wal.gyre", flusher)
    if sender is not None:
        sender.opened(opened.execution, wal.path)
        wal.listen(lambda seq, offset: sender.advanced(opened.execution, seq, offset))
    for record in records:
        await wal.write(record)
    await wal.close()
    return wal


async def test_many_executions_arrive_while_they_run(tmp_path: Path) -> None:
    sealed: list[str] = []
    ingest = Ingest(tmp_path / "ingest", on_sealed=lambda graph: sealed.append(graph.execution))
    with Flusher(tmp_path / "journal.gyre") as flusher:
        async with FrameSender("http://backend", "secret", client=client_for(ingest)) as sender:
            programs = [program(f"{i:012x}", 5 + i) for i in range(8)]
            wals = await asyncio.gather(*(log_of(tmp_path, flusher, p, sender) for p in programs))
            assert await sender.drain(20)
            assert sender.status().behind_bytes == 0
    assert sorted(sealed) == sorted(f"{i:012x}" for i in range(8))
    for wal, records in zip(wals, programs):
        execution = records[0].execution  # type: ignore[union-attr]
        assert (await ingest.graph(execution)).digest() == BranchGraph.replay(records).digest()
        assert (tmp_path / "ingest" / f"{execution}.gyre").read_bytes() == wal.path.read_bytes()
        assert list(read_records(wal.path)) == records


async def test_backend_that_loses_its_memory_gets_the_rest_only(tmp_path: Path) -> None:
    first = Ingest(tmp_path / "ingest")
    records = program("aa", 4)
    await first.receive("aa", b"".join(encode(r, i) for i, r in enumerate(records[:6])))
    second = Ingest(tmp_path / "ingest")
    graphs = await second.resume()
    assert graphs["aa"].digest() == BranchGraph.replay(records[:6]).digest()
    assert await second.want("aa") == 6
    with Flusher() as flusher:
        wal = await log_of(tmp_path, flusher, records)
    async with FrameSender("http://backend", "secret", client=client_for(second)) as sender:
        sender.resume("aa", wal.path)
        assert await sender.drain(20)
    assert second.stats.duplicates == 0
    assert (await second.graph("aa")).digest() == BranchGraph.replay(records).digest()


async def test_duplicates_gaps_and_damage(tmp_path: Path) -> None:
    ingest = Ingest(tmp_path)
    records = program("aa", 3)
    frames = [encode(record, seq) for seq, record in enumerate(records)]
    assert await ingest.receive("aa", b"".join(frames[:4])) == 4
    assert await ingest.receive("aa", b"".join(frames[:5])) == 5
    assert await ingest.receive("aa", b"".join(frames[:5])) == 5
    assert await ingest.receive("aa", b"".join(frames[7:])) == 5
    assert ingest.stats.gaps == 1
    before = (await ingest.graph("aa")).digest()
    flipped = bytearray(b"".join(frames[5:]))
    flipped[40] ^= 1
    for bad in (bytes(flipped), frames[5][:-1], frames[5] + frames[7]):
        with pytest.raises(IngestError):
            await ingest.receive("aa", bad)
    # A record that doesn't fit takes the good one before it along: nothing of the body is kept.
    with pytest.raises(IngestError, match="began twice"):
        await ingest.receive("aa", frames[5] + encode(records[1], 6))
    assert (await ingest.graph("aa")).digest() == before
    assert await ingest.want("aa") == 5
    with pytest.raises(IngestError, match="were sent as"):
        await ingest.receive("bb", frames[0])
    with pytest.raises(IngestError):
        await ingest.receive("../aa", frames[0])
    assert await ingest.receive("aa", b"".join(frames)) == len(frames)
    assert verify(tmp_path / "aa.gyre").ok


async def test_backend_gone_then_back(tmp_path: Path) -> None:
    ingest = Ingest(tmp_path / "ingest")
    app = Starlette(routes=ingest_routes(ingest, authorize=authorize))
    gone, answers = True, 0

    class Flaky(httpx.ASGITransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if gone:
                raise httpx.ConnectError("refused")
            nonlocal answers
            answer = await super().handle_async_request(request)
            answers += 1
            if answers in (1, 3):
                raise httpx.ReadError("cut after the backend had taken it")
            return answer

    records = program("aa", 20)
    with Flusher() as flusher:
        client = httpx.AsyncClient(transport=Flaky(app))
        async with FrameSender("http://backend", "secret", client=client) as sender:
            await log_of(tmp_path, flusher, records, sender)
            assert not await sender.drain(0.2)
            assert sender.status().behind_bytes > 0
            assert "refused" in sender.status().last_error
            gone = False
            assert await sender.drain(20)
    assert (await ingest.graph("aa")).digest() == BranchGraph.replay(records).digest()


async def test_a_wrong_token_is_told_once(tmp_path: Path) -> None:
    errors: list[str] = []
    ingest = Ingest(tmp_path / "ingest")
    with Flusher() as flusher:
        client = client_for(ingest)
        async with FrameSender(
            "http://backend", "wrong", client=client, on_error=lambda e, x: errors.append(e)
        ) as sender:
            await log_of(tmp_path, flusher, program("aa", 1), sender)
            for _ in range(100):
                if errors:
                    break
                await asyncio.sleep(0.01)
    assert errors == ["aa"]


async def test_a_log_of_another_run_is_refused(tmp_path: Path) -> None:
    ingest = Ingest(tmp_path / "ingest")
    records = program("aa", 4)
    await ingest.receive("aa", b"".join(encode(r, i) for i, r in enumerate(records[:9])))
    errors = []
    with Flusher() as flusher:
        async with FrameSender(
            "http://backend", "secret", client=client_for(ingest), on_error=lambda e, x: errors.append(x)
        ) as sender:
            await log_of(tmp_path, flusher, records[:3], sender)
            assert await sender.drain(10)
    assert len(errors) == 1
    assert isinstance(errors[0], CorruptRecordError)
    assert not isinstance(errors[0], ConfigError)
