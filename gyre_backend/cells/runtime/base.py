"""The protocol of a cell runtime: start, watch and end a cell. Weights, gradients and requests never pass
through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_sdk.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from gyre_backend.config import CellsTable


class CellHandle(Protocol):
    """One running cell."""

    @property
    def ready(self) -> CellReady:
        """What the cell said when it came up."""
        ...

    async def wait(self) -> str:
        """Until the cell is gone; says how it ended, in words."""
        ...

    async def kill(self) -> None:
        """End it now, with everything that it started; returns when it is gone."""
        ...

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, then kill it."""
        ...


class CellRuntime(Protocol):
    """Starts cells. Every cell dies with the process that holds the runtime."""

    async def start(self, spec: CellSpec, timeout_s: float) -> CellHandle:
        """Bring a cell up. Raises CellError with its last words when it does not come up."""
        ...

    async def aclose(self) -> None:
        """End every cell that is still there."""
        ...


def make_runtime(table: CellsTable, run_dir: Path) -> CellRuntime:
    """The runtime that the configuration names. Raises ConfigError, or MissingExtraError for `ray`."""
    if table.runtime == "local":
        from gyre_backend.cells.runtime.local import LocalRuntime

        return LocalRuntime(run_dir / "cells", preload=table.preload)
    if table.runtime == "ray":
        from gyre_backend.cells.runtime.ray import RayRuntime

        return RayRuntime(run_dir / "cells", address=table.ray_address, resources=table.ray_resources)
    raise ConfigError(f"cells.runtime = {table.runtime!r}: known are local and ray")
