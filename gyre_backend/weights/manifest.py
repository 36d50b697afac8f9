"""What a snapshot is: one entry per buffer, with everything a reader must check before it reads and after."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gyre_backend.errors import WeightsError

if TYPE_CHECKING:
    from gyre_backend.weights.regions import Region

CHUNK_BYTES = 256 << 10
"""Unit of transfer and of comparison: a reader that holds an older version pulls only chunks whose digest
differs.
"""
DIGEST_BYTES = 16


class BufferEntry(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous buffer of a snapshot."""

    name: str
    ptr: int
    """Address in the source's memory (Mooncake), or offset in bytes in the source's file (file)."""
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    chunks: bytes
    """Digests of the buffer's chunks of CHUNK_BYTES, DIGEST_BYTES each, in order."""

    @property
    def digest(self) -> str:
        """Digest of the whole buffer: BLAKE2b over its chunks' digests and its length."""
        return root_digest(self.chunks, self.nbytes)


class Delta(msgspec.Struct, frozen=True):
    """What changed since version `base`, as one more readable range; see `weights.delta` for its layout."""

    base: int
    ptr: int
    nbytes: int
    chunks: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen set of buffers at one version. Valid until its source says otherwise; the digests tell a
    reader that was too late.
    """

    version: int
    transport: str
    """mooncake | file."""
    session: str
    """Mooncake: `host:port` of the source's engine. File: the path."""
    entries: tuple[BufferEntry, ...]
    delta: Delta | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def digest(self) -> str:
        """One digest for names, types, shapes, bytes and version: equal digests mean equal snapshots."""
        state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for entry in self.entries:
            state.update(f"{entry.name}\0{entry.dtype}\0{entry.shape}\0{entry.nbytes}\0".encode())
            state.update(entry.chunks)
        state.update(str(self.version).encode())
        return state.hexdigest()

    def to_bytes(self) -> bytes:
        """msgpack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Inverse of `to_bytes`. Raises WeightsError."""
        try:
            return msgspec.msgpack.decode(data, type=Manifest)
        except msgspec.MsgspecError as error:
            raise WeightsError(f"not a snapshot manifest: {error}") from error


def chunk_digests(view_B: np.ndarray) -> bytes:
    """Digests of the chunks of a uint8[B] view. hashlib releases the GIL for inputs of this size."""
    digests = []
    for start in range(0, view_B.nbytes, CHUNK_BYTES):
        part = view_B[start : start + CHUNK_BYTES]
        digests.append(hashlib.blake2b(part.data, digest_size=DIGEST_BYTES).digest())
    return b"".join(digests)


def root_digest(chunks: bytes, nbytes: int) -> str:
    """Digest of a buffer from its chunks' digests and its length in bytes."""
    return hashlib.blake2b(chunks + nbytes.to_bytes(8, "little"), digest_size=DIGEST_BYTES).hexdigest()


def check_layout(manifest: Manifest, local: Sequence[Region]) -> None:
    """Same names in the same order, same bytes, types and shapes. Raises WeightsError naming the first
    difference.

    Also refuses a manifest whose own numbers do not fit together, before any byte is read.
    """
    if len(manifest.entries) != len(local):
        raise WeightsError(f"the snapshot holds {len(manifest.entries)} buffers, this cell {len(local)}")
    for entry, region in zip(manifest.entries, local, strict=True):
        theirs = (entry.name, entry.nbytes, entry.dtype, tuple(entry.shape))
        ours = (region.name, region.nbytes, region.dtype, tuple(region.shape))
        if theirs != ours:
            raise WeightsError(f"layouts differ: the snapshot holds {theirs}, this cell {ours}")
        count = -(-entry.nbytes // CHUNK_BYTES)
        if len(entry.chunks) != count * DIGEST_BYTES:
            raise WeightsError(f"{entry.name}: {len(entry.chunks)} bytes of digests for {count} chunks")
