"""Frames: one record each, numbered, checked by CRC.

    frame   = "GF" | version u16 | length u32 | seq u32 | crc u32 | payload[length]      (little-endian, 16
    bytes of header) crc     = CRC-32 (zlib's) over the header's first 12 bytes, then the payload payload =
    msgpack map of one record, tagged by its type

A frame says which version of the records it holds, so frames of old and new writers may follow each other in
one file and a body of frames needs no header of its own. A frame that ends beyond the data is *torn* (its
writer died, or is still writing); one whose bytes disagree with its CRC is *corrupt*.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire.records import VERSION, Record

MARKER = b"GF"
FRAME_HEADER_BYTES = 16
MAX_PAYLOAD_BYTES = 256 * 2**20
"""A longer length field can only be damage: 64M tokens in one record."""

_HEAD = struct.Struct("<2sHII")
_CRC = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class Frame(NamedTuple):
    """One whole, checked frame. `offset` and `end` are byte positions in the data it was read from."""

    seq: int
    version: int
    payload: memoryview
    offset: int
    end: int

    def encoded(self) -> bytes:
        """The whole frame again, header and all, byte for byte."""
        return frame_bytes(bytes(self.payload), self.seq, self.version)

    def record(self) -> Record:
        """The record in the payload. Raises CorruptRecordError for an unknown version, type or field type."""
        return decode_payload(self.payload, self.version, offset=self.offset)


def payload_kind(payload: bytes | memoryview) -> str:
    """The record's tag ("intent", "sealed" ...) without decoding it; empty when it has none."""
    head = bytes(payload[:32])
    at = head.find(b"\xa4type")
    if at < 0 or at + 5 >= len(head) or head[at + 5] & 0xE0 != 0xA0:
        return ""
    return head[at + 6 : at + 6 + (head[at + 5] & 0x1F)].decode(errors="replace")


def encode_payload(record: Record) -> bytes:
    """The record as msgpack. Raises CorruptRecordError when it could not be read back (a value of a wrong
    type, lone surrogates).
    """
    try:
        data = _encoder.encode(record)
        _decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise CorruptRecordError(f"a {type(record).__name__} record can't be written: {error}") from error
    if len(data) > MAX_PAYLOAD_BYTES:
        raise CorruptRecordError(
            f"a {type(record).__name__} record of {len(data)} bytes is over the limit of {MAX_PAYLOAD_BYTES}"
        )
    return data


def decode_payload(payload: bytes | memoryview, version: int = VERSION, *, offset: int | None = None) -> Record:
    """The record that `encode_payload` wrote in any version up to ours. Raises CorruptRecordError."""
    if not 1 <= version <= VERSION:
        raise CorruptRecordError(
            f"records of version {version} were written by a newer Gyre; this one reads up to {VERSION}",
            offset=offset,
        )
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptRecordError(f"not a record: {error}", offset=offset) from error


def frame_bytes(payload: bytes, seq: int, version: int = VERSION) -> bytes:
    """Header and payload of one frame."""
    head = _HEAD.pack(MARKER, version, len(payload), seq)
    return b"".join((head, _CRC.pack(zlib.crc32(payload, zlib.crc32(head))), payload))


def encode(record: Record, seq: int) -> bytes:
    """One frame holding `record`. Raises CorruptRecordError when the record is not well-formed."""
    return frame_bytes(encode_payload(record), seq)


def decode(data: bytes | memoryview) -> tuple[int, Record]:
    """(seq, record) of exactly one frame. Raises CorruptRecordError when the data is anything else."""
    frame = next_frame(data, 0)
    if frame is None or frame.end != len(data):
        raise CorruptRecordError(f"expected exactly one frame in {len(data)} bytes", offset=0)
    return frame.seq, frame.record()


def next_frame(data: bytes | bytearray | memoryview, offset: int) -> Frame | None:
    """The frame at `offset`, or None when it is torn (or there is nothing). Raises CorruptRecordError when
    its bytes are wrong.
    """
    view = memoryview(data)
    if len(view) - offset < FRAME_HEADER_BYTES:
        if bytes(view[offset : offset + 2]) != MARKER[: max(0, len(view) - offset)]:
            raise CorruptRecordError(f"no frame at byte {offset}", offset=offset)
        return None
    marker, version, length, seq = _HEAD.unpack_from(view, offset)
    if marker != MARKER or length > MAX_PAYLOAD_BYTES:
        raise CorruptRecordError(f"no frame at byte {offset}", offset=offset)
    start, end = offset + FRAME_HEADER_BYTES, offset + FRAME_HEADER_BYTES + length
    if end > len(view):
        return None
    (crc,) = _CRC.unpack_from(view, offset + _HEAD.size)
    payload = view[start:end]
    if zlib.crc32(payload, zlib.crc32(view[offset : offset + _HEAD.size])) != crc:
        raise CorruptRecordError(f"the frame at byte {offset} fails its checksum", offset=offset)
    return Frame(seq, version, payload, offset, end)


def iter_frames(data: bytes | bytearray | memoryview, offset: int = 0) -> Iterator[Frame]:
    """Whole frames from `offset` on; stops silently before a torn one (compare the last `end` with
    len(data)).

    Raises CorruptRecordError at the first corrupt frame. Payloads are views: the data must not change while
    they are used.
    """
    while (frame := next_frame(data, offset)) is not None:
        yield frame
        offset = frame.end


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """int32[n], little-endian, as bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def pack_floats(values: npt.ArrayLike) -> bytes:
    """float32[n], little-endian, as bytes."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def unpack_ids(data: bytes) -> Int32:
    """int32[n], a read-only view of `data`. Raises CorruptRecordError when its length is no multiple of 4."""
    _check_length(data)
    return np.frombuffer(data, dtype="<i4")


def unpack_floats(data: bytes) -> Float32:
    """float32[n], a read-only view of `data`. Raises CorruptRecordError when its length is no multiple of
    4.
    """
    _check_length(data)
    return np.frombuffer(data, dtype="<f4")


def _check_length(data: bytes) -> None:
    if len(data) % 4:
        raise CorruptRecordError(f"an array of 4-byte values can't have {len(data)} bytes")
