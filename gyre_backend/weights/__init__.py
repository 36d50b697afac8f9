"""Weights and gradients on the move: manifests, digests, Mooncake and file transports, pulls of whole
snapshots or of what changed.
"""

from __future__ import annotations

from gyre_backend.weights.manifest import BufferEntry, Delta, Manifest, check_layout
from gyre_backend.weights.pull import PullReport, pull
from gyre_backend.weights.regions import Region, region_of_array, regions_of
from gyre_backend.weights.snapshot import Publisher
from gyre_backend.weights.transport import FileTransport, ReadRange, Transport, make_transport

__all__ = [
    "BufferEntry",
    "Delta",
    "FileTransport",
    "Manifest",
    "Publisher",
    "PullReport",
    "ReadRange",
    "Region",
    "Transport",
    "check_layout",
    "make_transport",
    "pull",
    "region_of_array",
    "regions_of",
]
