"""Where cells run: one protocol, processes on this machine, or Ray."""

from __future__ import annotations

from gyre_backend.cells.runtime.base import CellHandle, CellRuntime, make_runtime

__all__ = ["CellHandle", "CellRuntime", "make_runtime"]
