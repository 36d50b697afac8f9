"""The reader's side: check the layout, pull what differs into staging memory, check every digest, and only
then touch the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_backend.errors import WeightsError
from gyre_backend.weights import delta as deltas
from gyre_backend.weights.manifest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    BufferEntry,
    Manifest,
    check_layout,
    chunk_digests,
)
from gyre_backend.weights.regions import Region, region_of_array
from gyre_backend.weights.transport import ReadRange, Transport

STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did."""

    version: int
    mode: str
    """full | chunks (only those that differed) | delta (only elements that differed) | none (nothing
    differed).
    """
    bytes_read: int
    bytes_total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Want:
    """One chunk to pull: `entry`'s bytes [start, start + nbytes) into `region`."""

    entry: BufferEntry
    region: Region
    start: int
    nbytes: int

    @property
    def digest(self) -> bytes:
        number = self.start // CHUNK_BYTES
        return self.entry.chunks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


def pull(
    manifest: Manifest,
    local: Sequence[Region],
    transport: Transport,
    *,
    held_version: int = -1,
    deadline_s: float = 60.0,
    staging_bytes: int = STAGING_BYTES,
) -> PullReport:
    """Bring `local` to the manifest's version. Blocking: call it from a thread.

    `held_version` says which version `local` holds (-1: unknown); it is a hint that allows less to be read,
    never a proof: what is kept
    has been compared by digest. Raises WeightsError; after that `local` may hold a mixture of whole, verified
    chunks of two versions, and
    must be treated as holding none.
    """
    begun = time.monotonic()
    check_layout(manifest, local)
    if transport.name != manifest.transport:
        raise WeightsError(f"the snapshot is offered by {manifest.transport}, this cell reads by {transport.name}")
    delta_bytes = _pull_delta(manifest, local, transport, held_version, deadline_s)
    wants = _differing(manifest, local, known=held_version >= 0 or delta_bytes is not None)
    bytes_read = sum(want.nbytes for want in wants)
    for group in _groups(wants, staging_bytes):
        _pull_group(manifest.session, group, transport, deadline_s)
    mode = "full" if bytes_read == manifest.nbytes else "chunks"
    if not bytes_read:
        mode = "none" if delta_bytes is None else "delta"
    return PullReport(
        version=manifest.version,
        mode=mode,
        bytes_read=bytes_read + (delta_bytes or 0),
        bytes_total=manifest.nbytes,
        seconds=time.monotonic() - begun,
    )


def _differing(manifest: Manifest, local: Sequence[Region], *, known: bool) -> list[_Want]:
    wants = []
    for entry, region in zip(manifest.entries, local, strict=True):
        ours = chunk_digests(region.view) if known else b""
        for number, start in enumerate(range(0, entry.nbytes, CHUNK_BYTES)):
            part = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
            if ours[part] != entry.chunks[part]:
                wants.append(_Want(entry, region, start, min(CHUNK_BYTES, entry.nbytes - start)))
    return wants


def _groups(wants: Sequence[_Want], staging_bytes: int) -> Iterator[list[_Want]]:
    group: list[_Want] = []
    size = 0
    for want in wants:
        if group and size + want.nbytes > staging_bytes:
            yield group
            group, size = [], 0
        group.append(want)
        size += want.nbytes
    if group:
        yield group


def _pull_group(session: str, group: Sequence[_Want], transport: Transport, deadline_s: float) -> None:
    """Pull chunks into fresh memory, verify, copy. Fresh every time: what an abandoned transfer still writes
    hits nothing of ours.
    """
    staging = region_of_array("staging", np.zeros(sum(want.nbytes for want in group), dtype=np.uint8))
    ranges, offset = [], 0
    for want in group:
        ranges.append(ReadRange(want.entry.ptr + want.start, staging.ptr + offset, want.nbytes))
        offset += want.nbytes
    transport.read(session, _merged(ranges), staging, deadline_s)
    view, offset = staging.view, 0
    for want in group:
        if chunk_digests(view[offset : offset + want.nbytes]) != want.digest:
            raise WeightsError(
                f"{want.entry.name} at byte {want.start}: what arrived does not have the manifest's digest"
            )
        offset += want.nbytes
    offset = 0
    for want in group:
        want.region.view[want.start : want.start + want.nbytes] = view[offset : offset + want.nbytes]
        offset += want.nbytes


def _merged(ranges: Sequence[ReadRange]) -> list[ReadRange]:
    """Neighbours at the source that are neighbours here become one range; the transport cuts as it likes."""
    merged: list[ReadRange] = []
    for part in ranges:
        last = merged[-1] if merged else None
        if last and last.remote + last.nbytes == part.remote and last.local + last.nbytes == part.local:
            merged[-1] = ReadRange(last.remote, last.local, last.nbytes + part.nbytes)
        else:
            merged.append(part)
    return merged


def _pull_delta(
    manifest: Manifest, local: Sequence[Region], transport: Transport, held_version: int, deadline_s: float
) -> int | None:
    """Apply the source's delta when we hold its base; bytes read, or None when there was none to apply.

    The caller compares all digests afterwards, so that a wrong delta (or a wrong `held_version`) costs bytes
    and never correctness.
    """
    delta = manifest.delta
    if delta is None or delta.base != held_version:
        return None
    staging = region_of_array("delta", np.zeros(delta.nbytes, dtype=np.uint8))
    transport.read(manifest.session, [ReadRange(delta.ptr, staging.ptr, delta.nbytes)], staging, deadline_s)
    if chunk_digests(staging.view) != delta.chunks:
        raise WeightsError("what arrived as a delta does not have the digest of the manifest")
    deltas.apply(staging.view, local)
    return delta.nbytes
