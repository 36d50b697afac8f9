"""Keys and values on their way to another engine: pinned at the source, pulled by the target, then let go.

A pin is a copy in memory of its own, so nothing that happens to the source's cache afterwards (a flush, new weights) touches it.
With a transport (Mooncake, files) the target reads that memory itself, by manifest and digests as for weights; without one it
fetches safetensors over HTTP. Whatever arrives is compared with the target's own layout before it goes near a running batch.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gyre_backend.engines.kv import KVLayout, SequenceKV
from gyre_backend.errors import WeightsError
from gyre_backend.weights import Manifest, Publisher, pull, regions_of
from gyre_backend.weights.transport import Transport

MAX_PINS = 64
"""The oldest pin is dropped beyond that: its puller then computes the prefix again."""
DEADLINE_S = 30.0


@dataclass(slots=True)
class Pin:
    """One sequence, held for a reader. `publisher` stands for the memory that the transport serves."""

    kv: SequenceKV
    publisher: Publisher | None = None
    manifest: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    tensor: Any


class KVExchange:
    """The pins of one engine, and its pulls. Methods block: call them from a thread, never the event loop's."""

    def __init__(self, transport: Transport | None = None) -> None:
        self.transport = transport
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._lock = threading.Lock()

    def pin(self, kv: SequenceKV) -> tuple[str, bytes | None]:
        """Hold `kv` (the caller's own copy) until `release`: (ticket, manifest). Without a transport there is no manifest."""
        pin = Pin(kv.to_host())
        if self.transport is not None:
            pin.publisher = Publisher(self.transport)
            parts = [_Part(name, tensor) for name, tensor in pin.kv.parts()]
            pin.manifest = pin.publisher.publish(regions_of(parts), 0).to_bytes()
        ticket = secrets.token_hex(16)
        with self._lock:
            self._pins[ticket] = pin
            oldest = next(iter(self._pins)) if len(self._pins) > MAX_PINS else None
        if oldest is not None:
            self.release(oldest)
        return ticket, pin.manifest

    def read(self, ticket: str) -> bytes | None:
        """The pinned sequence in safetensors' format; None when it is not (or no longer) pinned."""
        with self._lock:
            pin = self._pins.get(ticket)
        return None if pin is None else pin.kv.to_bytes()

    def release(self, ticket: str) -> bool:
        """Let go: reads that come later fail. False when there was nothing."""
        with self._lock:
            pin = self._pins.pop(ticket, None)
        if pin is not None and pin.publisher is not None:
            pin.publisher.withdraw()
        return pin is not None

    @property
    def pinned(self) -> int:
        """How many sequences are held."""
        return len(self._pins)

    def fetch(self, manifest: bytes, tokens: int, layout: KVLayout) -> SequenceKV:
        """Read a pinned sequence of `tokens` positions through the transport. Raises WeightsError: nothing is kept then."""
        if self.transport is None:
            raise WeightsError("this engine has no transport to read keys and values by")
        kv = SequenceKV.empty(layout, tokens)
        parts = [_Part(name, tensor) for name, tensor in kv.parts()]
        pull(Manifest.from_bytes(manifest), regions_of(parts), self.transport, deadline_s=DEADLINE_S)
        return kv.to_device(layout.device)

    @staticmethod
    def unpack(data: bytes, tokens: int, layout: KVLayout) -> SequenceKV:
        """What `read` of the source gave. Raises WeightsError when it does not fit this engine."""
        kv = SequenceKV.from_bytes(data, tokens)
        theirs, ours = _shapes(kv.parts()), _shapes(SequenceKV.empty(layout, tokens).parts())
        if theirs != ours:
            raise WeightsError(f"keys and values of {len(theirs)} buffers do not have this engine's layout")
        return kv.to_device(layout.device)

    def close(self) -> None:
        """Let everything go."""
        for ticket in list(self._pins):
            self.release(ticket)


def _shapes(parts: Sequence[tuple[str, Any]]) -> list[tuple[str, tuple[int, ...], Any]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in parts]
