"""Frames: whatever happens to bytes, what is read is what was written, or an error that says where."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire import (
    WalReader,
    decode,
    decode_payload,
    encode,
    file_header,
    frame_bytes,
    iter_frames,
    pack_floats,
    pack_ids,
    payload_kind,
    repair,
    unpack_floats,
    unpack_ids,
    verify,
)
from gyre_sdk.wire.records import VERSION, Event, Intent, Opened, Sealed
from tests.golden.generate import EXAMPLES

RECORDS = list(EXAMPLES.values())
FRAMES = [encode(record, seq) for seq, record in enumerate(RECORDS)]
LOG = file_header() + b"".join(FRAMES)


def test_the_wire_needs_no_heavy_library() -> None:
    code = (
        "import sys, gyre_sdk.wire, gyre_sdk.wire.records; "
        "print([m for m in ('networkx', 'pydantic', 'httpx', 'anyio', 'starlette', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_arrays_round_trip(ids: list[int], values: list[float]) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert unpack_floats(pack_floats(values)).tolist() == values
    assert unpack_ids(pack_ids(np.array(ids, np.int64))).dtype == np.int32


def test_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises((OverflowError, ValueError)):
        pack_ids([2**31])


@given(st.integers(0, len(LOG)))
def test_a_torn_log_gives_its_whole_frames(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    path = tmp_path_factory.mktemp("wal") / "wal.gyre"
    path.write_bytes(LOG[:size])
    whole = [f for f in FRAMES if size >= 16]
    ends = np.cumsum([16] + [len(f) for f in whole])
    count = int((ends <= size).sum()) - 1 if size >= 16 else 0
    if 0 < size < 16:
        assert verify(path).frames == 0
    assert [frame.record() for frame in WalReader(path).frames()] == RECORDS[:count]
    report = verify(path)
    assert report.frames == count
    assert report.ok == (size == 0 or size in ends)
    before = repair(path)
    assert before == report
    after = verify(path)
    assert after.frames == count
    assert after.torn_bytes == 0
    if report.torn_bytes:
        assert Path(f"{path}.cut-{report.good_bytes}").read_bytes() == LOG[report.good_bytes : size]


@given(st.integers(0, len(LOG) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_always_found(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("wal") / "wal.gyre"
    data = bytearray(LOG)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    report = verify(path)
    assert not report.ok
    ends = np.cumsum([16] + [len(f) for f in FRAMES])
    hurt = int((ends <= at).sum()) - 1
    assert report.frames == max(0, hurt)
    if 0 <= hurt < len(FRAMES) - 1:
        # Whatever the bit was in, even a length: whole frames follow, so this is no torn tail.
        assert report.damage
    read = []
    with contextlib.suppress(CorruptRecordError):
        for frame in WalReader(path).frames():
            read.append(frame.record())
    assert read == RECORDS[: max(0, hurt)]


def test_damage_in_the_middle_is_cut_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "wal.gyre"
    data = bytearray(LOG)
    data[len(LOG) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError, match="would be lost"):
        repair(path)
    assert path.read_bytes() == bytes(data)
    report = repair(path, cut_damage=True)
    assert verify(path).ok
    assert path.read_bytes() + Path(f"{path}.cut-{report.good_bytes}").read_bytes() == bytes(data)


@given(st.binary(max_size=200))
def test_noise_is_no_log(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("wal") / "wal.gyre"
    path.write_bytes(data)
    assert verify(path).frames == 0
    with contextlib.suppress(CorruptRecordError):
        list(iter_frames(data))
    with contextlib.suppress(CorruptRecordError):
        decode_payload(data)


def test_a_gap_in_the_numbers_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "wal.gyre"
    path.write_bytes(file_header() + FRAMES[0] + FRAMES[2])
    assert "expected 1" in verify(path).damage


def test_records_of_a_newer_gyre_are_refused() -> None:
    payload = bytes(next(iter_frames(FRAMES[0])).payload)
    with pytest.raises(CorruptRecordError, match="newer Gyre"):
        decode(frame_bytes(payload, 0, VERSION + 1))


def test_unknown_fields_of_a_newer_writer_are_skipped() -> None:
    import msgspec

    payload = msgspec.msgpack.encode({"type": "opened", "execution": "aa", "at": 1.0, "colour": "blue"})
    assert decode_payload(payload) == Opened(execution="aa", at=1.0)


@pytest.mark.parametrize(
    "record",
    [
        Intent(call=0, at=0.0, dialect="chat", marks={"a": 1}),  # type: ignore[dict-item]
        Intent(call=0, at=0.0, dialect="\ud800"),
        Event(name="x", at=0.0, data={"a": 2**70}),
        Sealed(at=0.0, outcome=None),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_back_is_not_written(record: Intent | Event | Sealed) -> None:
    with pytest.raises(CorruptRecordError, match="can't be written"):
        encode(record, 0)


def test_the_kind_is_known_without_decoding() -> None:
    for frame, record in zip(FRAMES, RECORDS):
        assert payload_kind(next(iter_frames(frame)).payload) == type(record).__name__.lower()
    assert payload_kind(b"") == ""
    assert payload_kind(b"\xa4type") == ""


def test_a_live_tail_reads_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "wal.gyre"
    path.write_bytes(LOG[:10])
    reader = WalReader(path)
    assert list(reader.frames()) == []
    path.write_bytes(file_header() + FRAMES[0] + FRAMES[1][:9])
    assert [frame.seq for frame in reader.frames()] == [0]
    path.write_bytes(LOG)
    assert [frame.seq for frame in reader.frames(max_bytes=1)] == [1]
    assert reader.skip_to(5)
    assert [frame.seq for frame in reader.frames()] == list(range(5, len(FRAMES)))
    assert reader.skip_to(2)
    assert next(iter(reader.frames())).seq == 2
    assert not reader.skip_to(len(FRAMES) + 1)
