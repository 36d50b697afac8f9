"""The source's side: freeze regions at a version, compute their digests once, and let others read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre_backend.weights import delta as deltas
from gyre_backend.weights.manifest import BufferEntry, Delta, Manifest, chunk_digests
from gyre_backend.weights.regions import Region, region_of_array
from gyre_backend.weights.transport import Transport


class Publisher:
    """Publishes one snapshot at a time: a new one withdraws the one before. The regions must not change while
    a snapshot stands.
    """

    def __init__(self, transport: Transport, *, delta: bool = False, delta_limit: float = 0.5) -> None:
        self.transport = transport
        self._delta = delta
        self._delta_limit = delta_limit
        self._standing: tuple[str, list[Region]] | None = None
        self._previous: tuple[int, list[np.ndarray]] | None = None
        self.manifest: Manifest | None = None

    def publish(self, regions: Sequence[Region], version: int) -> Manifest:
        """Make `regions` readable as `version`; the manifest is what readers need."""
        self.withdraw()
        exposed = list(regions)
        payload = self._payload(regions, version)
        if payload is not None:
            exposed.append(payload[1])
        session, pointers = self.transport.expose(exposed, version)
        entries = tuple(
            BufferEntry(r.name, ptr, r.nbytes, r.dtype, tuple(r.shape), chunk_digests(r.view))
            for r, ptr in zip(regions, pointers)
        )
        delta = None
        if payload is not None:
            base, region = payload
            delta = Delta(base=base, ptr=pointers[-1], nbytes=region.nbytes, chunks=chunk_digests(region.view))
        self._standing = (session, exposed)
        self.manifest = Manifest(
            version=version, transport=self.transport.name, session=session, entries=entries, delta=delta
        )
        return self.manifest

    def _payload(self, regions: Sequence[Region], version: int) -> tuple[int, Region] | None:
        """(base version, delta) when one is worth its bytes. Keeps a copy of this version for the next
        delta.
        """
        if not self._delta:
            return None
        made = None
        if self._previous is not None and self._previous[0] != version:
            base, old = self._previous
            limit = int(self._delta_limit * sum(region.nbytes for region in regions))
            array = deltas.encode(old, regions, limit_bytes=limit)
            made = None if array is None else (base, region_of_array("delta", array))
        self._previous = (version, [region.view.copy() for region in regions])
        return made

    def withdraw(self) -> None:
        """Nobody can read the standing snapshot from now on."""
        if self._standing is not None:
            self.transport.withdraw(*self._standing)
        self._standing = None
        self.manifest = None
