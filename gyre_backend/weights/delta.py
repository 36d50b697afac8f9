"""What changed between two versions of a snapshot, element by element, and its exact re-application.

Layout of a delta, little-endian: per buffer of the manifest, in order: count uint64, then `count` element
positions uint32 (uint64
for buffers of 2^32 elements and more), then `count` elements as raw bytes. With low-precision weights and
small steps most elements
keep their bits, so that a delta is far smaller than the snapshot; in float32 nearly all change and no delta
is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre_backend.errors import WeightsError
from gyre_backend.weights.regions import Region

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def element_bytes(region: Region) -> int:
    """Bytes per element, as far as positions are concerned."""
    count = int(np.prod(region.shape, dtype=np.int64)) if region.shape else 1
    size = region.nbytes // count if count else 1
    return size if size in _UNSIGNED and region.nbytes == size * count else 1


def encode(old: Sequence[np.ndarray], new: Sequence[Region], *, limit_bytes: int) -> np.ndarray | None:
    """Delta from `old` (uint8 views, one per region) to `new` as uint8[n]; None when it would be longer than
    `limit_bytes`.
    """
    parts: list[bytes] = []
    total = 0
    for before_B, region in zip(old, new, strict=True):
        size = element_bytes(region)
        before = before_B.view(_UNSIGNED[size])
        after = region.view.view(_UNSIGNED[size])
        positions = np.flatnonzero(before != after)
        wide = np.uint32 if after.size < 1 << 32 else np.uint64
        total += 8 + positions.size * (np.dtype(wide).itemsize + size)
        if total > limit_bytes:
            return None
        parts += [
            positions.size.to_bytes(8, "little"),
            positions.astype(wide).tobytes(),
            after[positions].tobytes(),
        ]
    return np.frombuffer(b"".join(parts), dtype=np.uint8).copy()


def apply(delta_B: np.ndarray, targets: Sequence[Region]) -> None:
    """Write a delta into regions that hold its base version. Raises WeightsError on a malformed one, before
    the first write.
    """
    writes = []
    data = delta_B.tobytes()
    offset = 0
    for region in targets:
        size = element_bytes(region)
        elements = region.view.view(_UNSIGNED[size])
        wide = np.uint32 if elements.size < 1 << 32 else np.uint64
        if offset + 8 > len(data):
            raise WeightsError("a delta ends too early")
        count = int.from_bytes(data[offset : offset + 8], "little")
        offset += 8
        end = offset + count * (np.dtype(wide).itemsize + size)
        if count > elements.size or end > len(data):
            raise WeightsError(f"a delta names {count} elements of {region.name}, which has {elements.size}")
        positions = np.frombuffer(data, dtype=wide, count=count, offset=offset)
        values = np.frombuffer(data, dtype=_UNSIGNED[size], count=count, offset=offset + positions.nbytes)
        if count and int(positions.max()) >= elements.size:
            raise WeightsError(f"a delta writes outside {region.name}")
        writes.append((elements, positions, values))
        offset = end
    if offset != len(data):
        raise WeightsError(f"a delta of {len(data)} bytes is longer than its content")
    for elements, positions, values in writes:
        elements[positions] = values
