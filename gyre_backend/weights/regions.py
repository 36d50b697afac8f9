"""A region: one contiguous, named piece of host memory that may be read by others or written by a pull."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gyre_backend.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of host memory at `ptr`. `owner` keeps it alive."""

    name: str
    ptr: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    owner: object = field(repr=False, compare=False)

    @property
    def view(self) -> np.ndarray:
        """uint8[nbytes], writable, over the memory itself."""
        if self.nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.ptr)), dtype=np.uint8)


class Named(Protocol):
    """A name and a tensor: the trainers' `NamedBuffer` is one."""

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> Any: ...


def region_of_array(name: str, array: np.ndarray) -> Region:
    """The region of a C-contiguous numpy array."""
    if not array.flags.c_contiguous:
        raise WeightsError(f"{name} is not contiguous in memory")
    return Region(name, array.ctypes.data, array.nbytes, str(array.dtype), tuple(array.shape), array)


def regions_of(buffers: Iterable[Named]) -> list[Region]:
    """Regions of contiguous torch tensors in host memory; for another device see `HostMirror`. Raises
    WeightsError.
    """
    regions = []
    for buffer in buffers:
        tensor = buffer.tensor
        if tensor.device.type != "cpu":
            raise WeightsError(f"{buffer.name} lies on {tensor.device}; mirror it in host memory first")
        if not tensor.is_contiguous():
            raise WeightsError(f"{buffer.name} is not contiguous in memory")
        regions.append(
            Region(
                name=buffer.name,
                ptr=tensor.data_ptr(),
                nbytes=tensor.numel() * tensor.element_size(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                owner=tensor,
            )
        )
    return regions


class HostMirror:
    """Host copies of buffers that lie on an accelerator: snapshots are read from, and pulls land in, host
    memory.
    """

    def __init__(self, buffers: Iterable[Named]) -> None:
        import torch

        self._pairs = []
        for buffer in buffers:
            tensor = buffer.tensor
            host = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)
            self._pairs.append((buffer.name, tensor, host))
        self.regions = regions_of(_Pair(name, host) for name, _, host in self._pairs)

    def from_device(self) -> None:
        """Refresh the host copies before a snapshot is published."""
        for _, tensor, host in self._pairs:
            if host is not tensor:
                host.copy_(tensor)

    def to_device(self) -> None:
        """Carry a completed pull over to the accelerator."""
        for _, tensor, host in self._pairs:
            if host is not tensor:
                tensor.data.copy_(host)


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    tensor: Any
