"""The ingest by itself: routes, callbacks, refusals, memory."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from gyre_backend.errors import IngestError
from gyre_backend.ingest import Ingest, ingest_routes
from gyre_backend.ingest import routes as routes_module
from gyre_backend.ingest.store import FrameStore
from gyre_sdk.errors import CorruptRecordError, StorageError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import encode
from gyre_sdk.wire.records import Opened, Record
from tests.stream.test_stream import authorize, program

pytestmark = pytest.mark.anyio


def body(records: list[Record], start: int = 0) -> bytes:
    return b"".join(encode(record, seq) for seq, record in enumerate(records, start))


async def test_routes_say_what_is_wanted_and_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest = Ingest(tmp_path)
    app = Starlette(routes=ingest_routes(ingest, authorize=authorize))
    headers = {"Authorization": "Bearer secret"}
    records = program("aa", 2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=headers) as client:
        url = "/v1/frames?execution=aa&from=0"
        assert (await client.post(url, content=b"")).json() == {"want": 0}
        assert (await client.post(url, content=body(records[:3]))).json() == {"want": 3}
        assert (await client.post(url, content=b"noise")).status_code == 422
        assert (await client.post("/v1/frames?execution=..%2Fa", content=b"")).status_code == 400
        assert (await client.post("/v1/frames", content=b"")).status_code == 400
        assert (await client.post(url, content=b"", headers={"Authorization": "Bearer x"})).status_code == 401
        monkeypatch.setattr(routes_module, "MAX_BODY_BYTES", 10)
        assert (await client.post(url, content=b"x" * 11)).status_code == 413
        monkeypatch.undo()

        def full(self: FrameStore, frames: bytes, count: int) -> None:
            raise StorageError("no space left on device")

        monkeypatch.setattr(FrameStore, "append", full)
        answer = await client.post(url, content=body(records[3:], 3))
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        monkeypatch.undo()
        assert (await client.post(url, content=body(records[3:], 3))).json() == {"want": len(records)}
    assert (await ingest.graph("aa")).digest() == BranchGraph.replay(records).digest()


async def test_callbacks_come_once_and_after_the_disk(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    def opened(graph: BranchGraph) -> None:
        assert (tmp_path / f"{graph.execution}.gyre").exists()
        told.append(("opened", graph.execution))

    ingest = Ingest(tmp_path, on_opened=opened, on_sealed=lambda graph: told.append(("sealed", graph.execution)))
    records = program("aa", 2)
    for seq, record in enumerate(records):
        await ingest.receive("aa", encode(record, seq))
        await ingest.receive("aa", encode(record, seq))
    assert told == [("opened", "aa"), ("sealed", "aa")]
    assert ingest.stats.duplicates == len(records)
    with pytest.raises(IngestError, match="sealed"):
        await ingest.receive("aa", encode(records[1], len(records)))
    # Another process is told by `resume`, not by callbacks.
    again = Ingest(tmp_path, on_sealed=lambda graph: told.append(("again", graph.execution)))
    graphs = await again.resume()
    assert graphs["aa"].outcome is not None
    await again.receive("aa", body(records))
    assert len(told) == 2


async def test_what_is_forgotten_is_read_again(tmp_path: Path) -> None:
    ingest = Ingest(tmp_path)
    records = program("aa", 3)
    await ingest.receive("aa", body(records[:5]))
    ingest.forget("aa")
    assert ingest.executions() == []
    assert ingest.live_graph("aa") is None
    assert await ingest.receive("aa", body(records[:2])) == 5
    assert ingest.executions() == []
    await ingest.receive("aa", body(records[5:], 5))
    assert (await ingest.graph("aa")).digest() == BranchGraph.replay(records).digest()
    with pytest.raises(IngestError, match="no execution"):
        await ingest.graph("bb")


async def test_an_execution_that_is_not_admitted(tmp_path: Path) -> None:
    def admit(opened: Opened) -> None:
        if opened.task != "known":
            raise IngestError("nobody ordered this", status=403)

    ingest = Ingest(tmp_path, admit=admit)
    with pytest.raises(IngestError, match="nobody ordered"):
        await ingest.receive("aa", body(program("aa", 1)))
    assert await ingest.want("aa") == 0
    assert not (tmp_path / "aa.gyre").exists()
    assert await ingest.receive("aa", encode(Opened(execution="aa", at=0.0, task="known"), 0)) == 1


async def test_a_torn_file_is_cut_and_a_damaged_one_refused(tmp_path: Path) -> None:
    records = program("aa", 3)
    await Ingest(tmp_path).receive("aa", body(records))
    path = tmp_path / "aa.gyre"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    ingest = Ingest(tmp_path)
    assert await ingest.want("aa") == len(records) - 1
    assert await ingest.receive("aa", body(records)) == len(records)
    assert path.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[60] ^= 4
    path.write_bytes(flipped)
    with pytest.raises(CorruptRecordError):
        await Ingest(tmp_path).resume()


async def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ingest = Ingest(tmp_path)
    records = program("aa", 3)
    await ingest.receive("aa", body(records[:4]))
    before = (tmp_path / "aa.gyre").read_bytes()
    real = os.pwrite

    def half(handle: int, data: memoryview, offset: int) -> int:
        if offset > len(before):
            raise OSError(28, "No space left on device")
        return real(handle, data[:30], offset)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(StorageError, match="No space"):
        await ingest.receive("aa", body(records[4:], 4))
    monkeypatch.undo()
    assert (tmp_path / "aa.gyre").read_bytes() == before
    assert await ingest.want("aa") == 4
    assert await ingest.receive("aa", body(records[4:], 4)) == len(records)
    assert (await ingest.graph("aa")).digest() == BranchGraph.replay(records).digest()
