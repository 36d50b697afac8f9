"""Pulls between real processes: what arrives is what was published, or nothing is said to have arrived."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gyre_backend.errors import WeightsError
from gyre_backend.weights import FileTransport, Manifest, make_transport, pull
from gyre_backend.weights.manifest import chunk_digests
from gyre_backend.weights.mooncake import MAX_DESCRIPTORS, MooncakeTransport, _Engine
from gyre_backend.weights.transport import ReadRange, Transport
from tests.weights.conftest import Source, local_regions

KINDS = ["mooncake", "file"]


def holds(regions: list, manifest: Manifest) -> bool:
    return all(chunk_digests(r.view) == e.chunks for r, e in zip(regions, manifest.entries, strict=True))


@pytest.fixture
def reader(tmp_path: Path) -> Callable[[str], Transport]:
    return lambda kind: make_transport(kind, folder=tmp_path / "reader")


@pytest.mark.parametrize("kind", KINDS)
def test_full_then_changed_chunks_then_nothing(
    kind: str, source: Callable[..., Source], reader: Callable[[str], Transport]
) -> None:
    origin, transport = source(kind, size=3 << 20), reader(kind)
    manifest = origin.publish(1)
    regions = local_regions(manifest)
    report = pull(manifest, regions, transport)
    assert report.mode == "full"
    assert report.bytes_read == manifest.nbytes == 9 << 20
    assert holds(regions, manifest)
    assert pull(manifest, regions, transport, held_version=1).mode == "none"
    regions[1].view[300_000] ^= 1  # one chunk of ours is not what it should be
    assert not holds(regions, manifest)
    report = pull(manifest, regions, transport, held_version=1)
    assert (report.mode, report.bytes_read) == ("chunks", 256 << 10)
    assert holds(regions, manifest)
    newer = origin.publish(2)
    pull(newer, regions, transport, held_version=1)
    assert holds(regions, newer)
    assert newer.digest != manifest.digest


@pytest.mark.parametrize("kind", KINDS)
def test_delta_moves_only_what_changed(
    kind: str, source: Callable[..., Source], reader: Callable[[str], Transport]
) -> None:
    origin, transport = source(kind, size=4 << 20, delta=True), reader(kind)
    first = origin.publish(1)
    regions = local_regions(first)
    pull(first, regions, transport)
    second = origin.publish(2)
    assert second.delta is not None
    report = pull(second, regions, transport, held_version=1)
    assert report.mode == "delta"
    assert report.bytes_read < second.nbytes // 1000
    assert holds(regions, second)
    # A reader that is wrong about what it holds pays in bytes, never in correctness.
    strange = local_regions(second)
    report = pull(second, strange, transport, held_version=1)
    assert report.mode == "full"
    assert holds(strange, second)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_is_checked_before_a_byte_moves(
    kind: str, source: Callable[..., Source], reader: Callable[[str], Transport]
) -> None:
    manifest = source(kind).publish(1)
    regions = local_regions(manifest)
    entry = manifest.entries[0]
    for forged in (
        msgspec.structs.replace(entry, dtype="int32"),
        msgspec.structs.replace(entry, name="other"),
        msgspec.structs.replace(entry, shape=(1, *entry.shape)),
        msgspec.structs.replace(entry, nbytes=entry.nbytes - 4),
        msgspec.structs.replace(entry, chunks=entry.chunks[:-1]),
    ):
        wrong = msgspec.structs.replace(manifest, entries=(forged, *manifest.entries[1:]))
        with pytest.raises(WeightsError):
            pull(wrong, regions, reader(kind))
        assert not regions[0].view.any()
    with pytest.raises(WeightsError, match="2 buffers, this cell 3|3 buffers"):
        pull(msgspec.structs.replace(manifest, entries=manifest.entries[:2]), regions, reader(kind))
    other = "file" if kind == "mooncake" else "mooncake"
    with pytest.raises(WeightsError, match="offered by"):
        pull(msgspec.structs.replace(manifest, transport=other), regions, reader(kind))


def test_forged_range_fails_and_the_source_survives(
    source: Callable[..., Source], reader: Callable[[str], Transport]
) -> None:
    origin, transport = source("mooncake"), reader("mooncake")
    manifest = origin.publish(1)
    for ptr in (manifest.entries[0].ptr + (1 << 40), 4096):
        forged = msgspec.structs.replace(manifest.entries[0], ptr=ptr)
        with pytest.raises(WeightsError):
            pull(
                msgspec.structs.replace(manifest, entries=(forged, *manifest.entries[1:])),
                local_regions(manifest),
                transport,
            )
    regions = local_regions(manifest)
    pull(manifest, regions, transport)
    assert holds(regions, manifest)


def test_withdrawn_memory_is_not_served(source: Callable[..., Source], reader: Callable[[str], Transport]) -> None:
    origin, transport = source("mooncake"), reader("mooncake")
    manifest = origin.publish(1)
    origin.ask("withdraw")
    with pytest.raises(WeightsError):
        pull(manifest, local_regions(manifest), transport)


@pytest.mark.parametrize("change", ["scribble", "publish 2"])
def test_torn_snapshot_is_told_apart(
    change: str, source: Callable[..., Source], reader: Callable[[str], Transport]
) -> None:
    """The source's memory changed after the manifest was made: the digests say so, whatever else went
    well.
    """
    origin, transport = source("mooncake"), reader("mooncake")
    manifest = origin.publish(1)
    origin.ask(change)
    with pytest.raises(WeightsError, match="digest"):
        pull(manifest, local_regions(manifest), transport)


def test_killed_source_in_mid_read(source: Callable[..., Source], reader: Callable[[str], Transport]) -> None:
    origin, transport = source("mooncake", size=64 << 20, count=2), reader("mooncake")
    manifest = origin.publish(1)
    regions = local_regions(manifest)
    timer = threading.Timer(0.3, origin.process.kill)
    timer.start()
    begun = time.monotonic()

    def read_on() -> None:
        for _ in range(200):
            pull(manifest, regions, transport)

    with pytest.raises(WeightsError):
        read_on()
    assert time.monotonic() - begun < 60
    timer.join()
    # The reader is as good as new: another source, the same transport.
    again = source("mooncake")
    manifest = again.publish(7)
    regions = local_regions(manifest)
    pull(manifest, regions, transport)
    assert holds(regions, manifest)


def test_stopped_source_and_no_late_write(source: Callable[..., Source], reader: Callable[[str], Transport]) -> None:
    origin, transport = source("mooncake", size=8 << 20), reader("mooncake")
    manifest = origin.publish(1)
    regions = local_regions(manifest)
    origin.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(WeightsError):
            pull(manifest, regions, transport, deadline_s=6.0)
        untouched = [region.view.copy() for region in regions]
        assert not any(view.any() for view in untouched)
    finally:
        origin.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert not any(region.view.any() for region in regions), "a late write reached the weights"
    pull(manifest, regions, transport)
    assert holds(regions, manifest)


def test_many_descriptors_need_chunking(source: Callable[..., Source], reader: Callable[[str], Transport]) -> None:
    """4096 descriptors in one call are refused by the library; ours cuts them, and reads the same bytes."""
    origin, transport = source("mooncake", size=4 << 20, count=1), reader("mooncake")
    manifest = origin.publish(1)
    [region] = local_regions(manifest)
    piece = region.nbytes // 4096
    ranges = [ReadRange(manifest.entries[0].ptr + i * piece, region.ptr + i * piece, piece) for i in range(4096)]
    engine = _Engine("127.0.0.1", "tcp", "")
    engine.register(region.ptr, region.nbytes)
    code = engine.raw.batch_transfer_sync_read(
        manifest.session, [r.local for r in ranges], [r.remote for r in ranges], [r.nbytes for r in ranges]
    )
    assert code != 0, "the limit that MAX_DESCRIPTORS guards against is gone"
    region.view[:] = 0
    transport.read(manifest.session, ranges, region, 30.0)
    assert len(ranges) > MAX_DESCRIPTORS
    assert holds([region], manifest)


def test_parallel_readers(source: Callable[..., Source], reader: Callable[[str], Transport]) -> None:
    origin, transport = source("mooncake", size=16 << 20, count=1), reader("mooncake")
    manifest = origin.publish(1)
    results: list[bool] = []

    def one() -> None:
        regions = local_regions(manifest)
        pull(manifest, regions, transport)
        results.append(holds(regions, manifest))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_reads_outside_the_target_are_refused(tmp_path: Path) -> None:
    transport = FileTransport(tmp_path)
    manifest_target = local_regions(Manifest(version=0, transport="file", session="", entries=()))
    assert manifest_target == []
    array = np.zeros(8, dtype=np.uint8)
    from gyre_backend.weights import region_of_array

    region = region_of_array("x", array)
    for part in (ReadRange(0, region.ptr, 9), ReadRange(0, region.ptr - 1, 1), ReadRange(0, region.ptr, 0)):
        with pytest.raises(WeightsError, match="does not fit"):
            transport.read("nowhere", [part], region, 1.0)


def test_file_snapshot_appears_whole_and_goes(tmp_path: Path) -> None:
    from gyre_backend.weights import Publisher, region_of_array

    transport = FileTransport(tmp_path / "s")
    publisher = Publisher(transport)
    region = region_of_array("x", np.arange(1000, dtype=np.float64))
    first = publisher.publish([region], 1)
    assert Path(first.session).stat().st_size == 8000
    second = publisher.publish([region], 2)
    assert not Path(first.session).exists()
    target = local_regions(second)
    pull(second, target, transport)
    assert holds(target, second)
    publisher.withdraw()
    assert list((tmp_path / "s").iterdir()) == []
    with pytest.raises(WeightsError, match="can't be read"):
        pull(second, target, transport)


def test_unregistered_local_memory_is_refused_by_our_table() -> None:
    transport = MooncakeTransport()
    engine = transport._take_reader()
    engine.register(1 << 20, 4096)
    assert engine.table.covers(1 << 20, 4096)
    assert not engine.table.covers((1 << 20) - 1, 10)
    assert not engine.table.covers((1 << 20) + 4090, 10)
    with pytest.raises(WeightsError, match="overlaps"):
        engine.table.add((1 << 20) + 100, 10)
    engine.unregister(1 << 20)
    assert not engine.table.covers(1 << 20, 1)
