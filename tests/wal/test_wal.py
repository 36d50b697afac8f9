"""The log: durable before it is acknowledged, a prefix of what was appended whatever breaks."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_sdk.capture import flusher as flusher_module
from gyre_sdk.capture.flusher import recover
from gyre_sdk.capture.wal import Flusher, Wal, read_records, verify
from gyre_sdk.errors import ConfigError, CorruptRecordError, StorageError
from gyre_sdk.wire.records import Event, Opened, Record

pytestmark = pytest.mark.anyio


def event(number: int, size: int = 10) -> Event:
    return Event(name="x" * size, at=0.0, data={"n": number})


@pytest.fixture
def flusher(tmp_path: Path) -> Iterator[Flusher]:
    with Flusher(tmp_path / "journal.gyre") as made:
        yield made


class Disk:
    """Stands in for os.pwrite and os.fdatasync: full after `room` bytes, or failing to sync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.sync_error: int | None = None
        self.synced = 0
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def pwrite(self, file: int, data: memoryview, offset: int) -> int:
        if self.room is None:
            return self._pwrite(file, data, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._pwrite(file, data[: self.room], offset)
        self.room -= written
        return written

    def fdatasync(self, file: int) -> None:
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        self.synced += 1
        self._fdatasync(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def test_records_come_back(tmp_path: Path, flusher: Flusher) -> None:
    records: list[Record] = [Opened(execution="e", at=0.0), *map(event, range(20))]
    wal = Wal.create(tmp_path / "e" / "wal.gyre", flusher)
    told: list[tuple[int, int]] = []
    wal.listen(lambda seq, offset: told.append((seq, offset)))
    assert [await wal.write(record) for record in records] == list(range(21))
    await wal.close()
    await wal.close()
    assert list(read_records(wal.path)) == records
    assert told[-1] == (21, wal.path.stat().st_size)
    with pytest.raises(StorageError, match="closed"):
        wal.append(event(0))
    with pytest.raises(ConfigError, match="never overwritten"):
        Wal.create(wal.path, flusher)


async def test_nothing_is_acknowledged_before_it_is_synced(tmp_path: Path, flusher: Flusher, disk: Disk) -> None:
    wal = Wal.create(tmp_path / "wal.gyre", flusher)
    for number in range(5):
        before = disk.synced
        await wal.write(event(number))
        assert disk.synced > before
        assert verify(wal.path).frames == number + 1
    await wal.close()


async def test_calls_that_wait_share_a_sync(tmp_path: Path, flusher: Flusher, disk: Disk) -> None:
    wals = [Wal.create(tmp_path / str(i) / "wal.gyre", flusher) for i in range(20)]
    await asyncio.gather(*(wal.write(event(0)) for wal in wals))
    before = disk.synced
    await asyncio.gather(*(wal.write(event(n)) for wal in wals for n in range(10)))
    assert disk.synced - before < 100
    for wal in wals:
        assert wal.durable_seq == 11
        await wal.close()


async def test_a_full_disk_fails_the_call_and_keeps_the_log_whole(tmp_path: Path, flusher: Flusher, disk: Disk) -> None:
    wal = Wal.create(tmp_path / "wal.gyre", flusher)
    await wal.write(event(0))
    disk.room = 25
    with pytest.raises(StorageError, match="No space left"):
        await wal.write(event(1))
    assert verify(wal.path).ok
    assert verify(wal.path).frames == 1
    assert wal.durable_seq == 1
    with pytest.raises(StorageError):
        await wal.write(event(2))
    disk.room = None
    await wal.write(event(3))
    await wal.close()
    # What failed was never acknowledged, but the log is what the process thinks it is.
    assert list(read_records(wal.path)) == [event(n) for n in range(4)]


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
async def test_a_sync_that_fails_is_not_believed(tmp_path: Path, flusher: Flusher, disk: Disk, error: int) -> None:
    wal = Wal.create(tmp_path / "wal.gyre", flusher)
    await wal.write(event(0))
    disk.sync_error = error
    with pytest.raises(StorageError, match=os.strerror(error)):
        await wal.write(event(1))
    assert verify(wal.path).frames == 1
    disk.sync_error = None
    await wal.write(event(2))
    await wal.close()
    assert list(read_records(wal.path)) == [event(n) for n in range(3)]


async def test_many_logs_on_a_full_disk(tmp_path: Path, flusher: Flusher, disk: Disk) -> None:
    wals = [Wal.create(tmp_path / str(i) / "wal.gyre", flusher) for i in range(8)]
    await asyncio.gather(*(wal.write(event(0)) for wal in wals))
    disk.room = 500
    done = await asyncio.gather(*(wal.write(event(1, 60)) for wal in wals), return_exceptions=True)
    assert any(isinstance(result, StorageError) for result in done)
    for wal, result in zip(wals, done):
        assert verify(wal.path).ok
        assert verify(wal.path).frames == (1 if isinstance(result, StorageError) else 2)
    disk.room = None
    await asyncio.gather(*(wal.write(event(2)) for wal in wals))
    for wal in wals:
        await wal.close()
        assert list(read_records(wal.path)) == [event(0), event(1, 60), event(2)]


async def test_too_much_is_refused(
    tmp_path: Path, flusher: Flusher, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_sdk.capture.wal.MAX_QUEUED_BYTES", 1000)
    wal = Wal.create(tmp_path / "wal.gyre", flusher)
    await wal.write(event(0))
    disk.room = 0
    while wal._queued_bytes <= 1000:
        wal.append(event(wal.next_seq, 100))
    with pytest.raises(StorageError):
        wal.append(event(9, 100))
    disk.room = None
    await wal.durable(wal.next_seq - 1)
    await wal.close()


async def test_a_folder_that_can_not_be_made(tmp_path: Path, flusher: Flusher) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        Wal.create(tmp_path / "file" / "wal.gyre", flusher)
    with pytest.raises(StorageError):
        Wal.open(tmp_path / "missing.gyre", flusher)


async def test_one_writer_at_a_time(tmp_path: Path, flusher: Flusher) -> None:
    wal = Wal.create(tmp_path / "wal.gyre", flusher)
    await wal.write(event(0))
    with pytest.raises(ConfigError, match="another process"):
        Wal.open(wal.path, flusher)
    await wal.close()
    again, report = Wal.open(wal.path, flusher)
    assert report.ok
    assert again.next_seq == 1
    await again.write(event(1))
    await again.close()
    assert list(read_records(wal.path)) == [event(0), event(1)]


async def test_open_cuts_a_torn_tail_and_refuses_damage(tmp_path: Path, flusher: Flusher) -> None:
    path = tmp_path / "wal.gyre"
    wal = Wal.create(path, flusher)
    for number in range(3):
        await wal.write(event(number))
    await wal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    again, report = Wal.open(path, flusher)
    assert report.torn_bytes > 0
    assert again.next_seq == 2
    await again.write(event(7))
    await again.close()
    assert list(read_records(path)) == [event(0), event(1), event(7)]
    damaged = bytearray(whole)
    damaged[40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptRecordError):
        Wal.open(path, flusher)
    # Only a header's beginning was written: start anew.
    path.write_bytes(whole[:7])
    fresh, _ = Wal.open(path, flusher)
    await fresh.write(event(9))
    await fresh.close()
    assert list(read_records(path)) == [event(9)]


async def test_the_journal_completes_logs_after_a_crash_of_the_machine(tmp_path: Path) -> None:
    flusher = Flusher(tmp_path / "journal.gyre")
    wals = [Wal.create(tmp_path / str(i) / "wal.gyre", flusher) for i in range(6)]
    await asyncio.gather(*(wal.write(event(n)) for n in range(5) for wal in wals))
    assert flusher.stats.syncs < flusher.stats.records
    expected = [wal.path.read_bytes() for wal in wals]
    journal = (tmp_path / "journal.gyre").read_bytes()
    for wal in wals:
        await wal.close()
    flusher.close()
    assert not (tmp_path / "journal.gyre").exists()
    # The machine died: what only the journal had synced is gone from the logs.
    (tmp_path / "journal.gyre").write_bytes(journal + b"GF\1\0half a frame")
    for i, wal in enumerate(wals):
        wal.path.write_bytes(expected[i][: [0, 16, 40][i % 3]])
    played = recover(tmp_path / "journal.gyre")
    assert played > 0
    journaled = [i for i, wal in enumerate(wals) if wal.path.read_bytes() == expected[i]]
    # A log whose beginning was synced by itself has a gap before what the journal holds; all others are whole
    # again.
    assert len(journaled) >= len(wals) - 2
    for wal in wals:
        assert not verify(wal.path).damage
    assert recover(tmp_path / "journal.gyre") == 0


async def test_the_journal_is_emptied_when_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher_module, "JOURNAL_BYTES", 5000)
    with Flusher(tmp_path / "journal.gyre") as flusher:
        wals = [Wal.create(tmp_path / str(i) / "wal.gyre", flusher) for i in range(4)]
        for number in range(30):
            await asyncio.gather(*(wal.write(event(number, 200)) for wal in wals))
        assert (tmp_path / "journal.gyre").stat().st_size < 10000
        for wal in wals:
            await wal.close()
            assert list(read_records(wal.path)) == [event(n, 200) for n in range(30)]


async def test_two_processes_never_share_a_journal(tmp_path: Path) -> None:
    """Whoever comes second is told, and the journal of the first stays as it is."""
    with Flusher(tmp_path / "journal.gyre") as flusher:
        early = Flusher(tmp_path / "journal.gyre")
        wals = [Wal.create(tmp_path / str(i) / "wal.gyre", flusher) for i in range(4)]
        await asyncio.gather(*(wal.write(event(n)) for n in range(5) for wal in wals))
        held = (tmp_path / "journal.gyre").read_bytes()
        assert held
        with pytest.raises(ConfigError, match="another process"):
            Flusher(tmp_path / "journal.gyre")
        with pytest.raises(ConfigError, match="another process"):
            recover(tmp_path / "journal.gyre")
        others = [Wal.create(tmp_path / f"other{i}" / "wal.gyre", early) for i in range(4)]
        await asyncio.gather(*(wal.write(event(n)) for n in range(5) for wal in others))
        assert (tmp_path / "journal.gyre").read_bytes() == held
        early.close()
        for wal in (*wals, *others):
            await wal.close()
            assert list(read_records(wal.path)) == [event(n) for n in range(5)]


CHILD = """
import asyncio, sys
from pathlib import Path
from gyre_sdk.capture.wal import Flusher, Wal
from gyre_sdk.wire.records import Event

async def main(folder):
    flusher = Flusher(folder / "journal.gyre")
    async def one(i):
        wal = Wal.create(folder / str(i) / "wal.gyre", flusher)
        n = 0
        while True:
            await wal.write(Event(name="x" * (n * 37 % 4000), at=0.0, data={"n": n}))
            print(i, n, flush=True)
            n += 1
    await asyncio.gather(*map(one, range(4)))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("lines", [1, 7, 60, 333])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, lines: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = [child.stdout.readline() for _ in range(lines)]
    child.send_signal(signal.SIGKILL)
    told += child.stdout.read().splitlines()
    child.stdout.close()
    child.wait()
    acknowledged = dict.fromkeys(range(4), -1)
    for line in told:
        # The last line may have been cut too.
        if len(parts := line.split()) == 2:
            acknowledged[int(parts[0])] = max(acknowledged[int(parts[0])], int(parts[1]))
    recover(tmp_path / "journal.gyre")
    for i in range(4):
        report = verify(tmp_path / str(i) / "wal.gyre")
        assert not report.damage
        records = list(read_records(tmp_path / str(i) / "wal.gyre"))
        numbers = [record.data["n"] for record in records if isinstance(record, Event)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > acknowledged[i]
