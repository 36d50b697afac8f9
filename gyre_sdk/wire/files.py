"""WAL files on disk: an 8-byte magic, a version, then frames 0, 1, 2 ... See `codec` for the frames.

    header = "GYREWAL\\n" | version u16 | 0 u16 | crc u32 (of the 12 bytes before it)

A version says how the header and frames are laid out; frames carry the version of their records themselves.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire.codec import MARKER, Frame, next_frame

MAGIC = b"GYREWAL\n"
FILE_VERSION = 1
FILE_HEADER_BYTES = 16
_HEAD = struct.Struct("<8sHH")
_CRC = struct.Struct("<I")
_CHUNK_BYTES = 4 * 2**20


def file_header(version: int = FILE_VERSION) -> bytes:
    """The 16 bytes every WAL begins with."""
    head = _HEAD.pack(MAGIC, version, 0)
    return head + _CRC.pack(zlib.crc32(head))


def check_file_header(data: bytes | memoryview) -> int:
    """The file's version. Raises CorruptRecordError when it is no WAL or one of a newer Gyre."""
    head = bytes(data[:FILE_HEADER_BYTES])
    if len(head) < FILE_HEADER_BYTES or not head.startswith(MAGIC):
        raise CorruptRecordError("not a Gyre WAL: it does not begin with its magic", offset=0)
    _, version, _ = _HEAD.unpack_from(head)
    if _CRC.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
        raise CorruptRecordError("the WAL's header fails its checksum", offset=0)
    if version > FILE_VERSION:
        raise CorruptRecordError(
            f"a WAL of version {version} was written by a newer Gyre; this one reads up to {FILE_VERSION}",
            offset=0,
        )
    return int(version)


class WalReader:
    """Reads a WAL in bounded memory, also while it is being written: call `frames()` again to get what was
    added since.

    `limit` bounds every read (a byte offset): a live tail passes the end of what is known to be on disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Byte position behind the last frame returned."""
        self.next_seq = 0
        """Number of the next frame."""

    def frames(self, limit: int | None = None, max_bytes: int | None = None) -> Iterator[Frame]:
        """Whole frames from where the last call stopped; stops before a torn one, or once `max_bytes` were
        yielded.

        Each frame's payload stays valid. Raises CorruptRecordError (with the offset) for damage or a gap in
        the numbers.
        """
        try:
            opened = self.path.open("rb")
        except (IsADirectoryError, PermissionError) as error:
            raise CorruptRecordError(f"{self.path} can't be read: {error.strerror}", offset=0) from error
        with opened as file:
            end = os.fstat(file.fileno()).st_size
            end = end if limit is None else min(end, limit)
            if self.offset == 0:
                if end < FILE_HEADER_BYTES:
                    return
                check_file_header(file.read(FILE_HEADER_BYTES))
                self.offset = FILE_HEADER_BYTES
            yielded, want = 0, _CHUNK_BYTES
            while self.offset < end:
                file.seek(self.offset)
                base = self.offset
                data = file.read(min(want, end - base))
                position = 0
                for frame in self._whole(data, base):
                    position = frame.end - base
                    self.offset, self.next_seq = frame.end, self.next_seq + 1
                    yield frame
                    yielded += frame.end - frame.offset
                    if max_bytes is not None and yielded >= max_bytes:
                        return
                if position == 0:
                    if base + len(data) >= end:
                        return
                    want *= 2
                else:
                    want = _CHUNK_BYTES

    def _whole(self, data: bytes, base: int) -> Iterator[Frame]:
        position = 0
        while position < len(data):
            try:
                frame = next_frame(data, position)
            except CorruptRecordError as error:
                raise CorruptRecordError(
                    f"{self.path}: damaged at byte {base + position}", offset=base + position
                ) from error
            if frame is None:
                return
            if frame.seq != self.next_seq:
                raise CorruptRecordError(
                    f"{self.path}: frame {frame.seq} at byte {base + position}, expected {self.next_seq}",
                    offset=base + position,
                )
            position = frame.end
            yield frame._replace(offset=base + frame.offset, end=base + frame.end)

    def skip_to(self, seq: int, limit: int | None = None) -> bool:
        """Go to frame `seq` (back or forth). False when the file does not hold all frames before it."""
        if seq < self.next_seq:
            self.offset, self.next_seq = 0, 0
        while self.next_seq < seq:
            before = self.next_seq
            for _ in self.frames(limit):
                if self.next_seq >= seq:
                    break
            if self.next_seq == before:
                return False
        return True


@dataclass(frozen=True, slots=True)
class WalReport:
    """What `verify` found. `damage` is empty for a whole file; a torn tail alone is not damage."""

    path: Path
    frames: int
    good_bytes: int
    """Length of the header and all frames up to the first problem."""
    total_bytes: int
    damage: str = ""
    damage_offset: int | None = None

    @property
    def torn_bytes(self) -> int:
        """Bytes behind the last whole frame."""
        return self.total_bytes - self.good_bytes

    @property
    def ok(self) -> bool:
        """Whole to the last byte."""
        return not self.damage and self.torn_bytes == 0

    def __str__(self) -> str:
        text = f"{self.path}: {self.frames} records, {self.good_bytes} of {self.total_bytes} bytes good"
        if self.damage:
            return f"{text}; DAMAGED: {self.damage}"
        return text if self.ok else f"{text}; torn tail of {self.torn_bytes} bytes"


def verify(path: Path) -> WalReport:
    """Check every frame: numbers, checksums, and that each record decodes. Never raises for bad content.
    OSError for no file.
    """
    reader = WalReader(path)
    total = path.stat().st_size
    good, frames, damage, where = 0, 0, "", None
    try:
        for frame in reader.frames():
            frame.record()
            good, frames = frame.end, frames + 1
        good = reader.offset
        if FILE_HEADER_BYTES <= good < total and _frame_behind(path, good, frames):
            # A length that was damaged looks like a torn tail, but whole frames follow.
            damage, where = f"{path}: damaged at byte {good}", good
    except CorruptRecordError as error:
        damage, where = str(error), error.offset
        good = good or (reader.offset if frames == 0 and where else 0)
    return WalReport(path, frames, good, total, damage, where)


def _frame_behind(path: Path, start: int, seq: int) -> bool:
    """Whether a whole frame with a number behind `seq` begins anywhere behind `start`."""
    data = path.read_bytes()
    at = data.find(MARKER, start + 1)
    while at >= 0:
        try:
            frame = next_frame(data, at)
        except CorruptRecordError:
            frame = None
        if frame is not None and frame.seq > seq:
            return True
        at = data.find(MARKER, at + 1)
    return False


def repair(path: Path, *, cut_damage: bool = False) -> WalReport:
    """Cut a torn tail; damage in the middle is cut only when `cut_damage` (all frames behind it are lost, so
    the caller asks first).

    What is cut is kept beside the file as `<name>.cut-<offset>`. Returns the report from before. Raises
    CorruptRecordError for damage that may not be cut, or for a file with no readable header and something in
    it.
    """
    report = verify(path)
    if report.ok:
        return report
    if report.damage and not cut_damage:
        raise CorruptRecordError(f"{report}; records behind the damage would be lost", offset=report.damage_offset)
    if report.good_bytes < FILE_HEADER_BYTES and report.damage:
        raise CorruptRecordError(f"{path} has no readable header: it can't be repaired", offset=0)
    good = report.good_bytes
    with path.open("r+b") as file:
        file.seek(good)
        Path(f"{path}.cut-{good}").write_bytes(file.read())
        file.truncate(good)
        os.fsync(file.fileno())
    return report
