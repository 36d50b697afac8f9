"""Cells on a Ray cluster: one placement group and one actor per cell. Placement, lifecycle and control
messages only.

The actor does on its node what the local runtime does here: it starts the cell as a child process, hands the
ready line on and waits for
the end. Requests go to the cell by HTTP, weights and gradients by Mooncake; nothing of that passes through
Ray. When the actor goes (its
node is lost, the driver ends), the cell's process dies with it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gyre_backend.cells.runtime.local import LocalCell, LocalRuntime
from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_backend.errors import CellError
from gyre_sdk.errors import ConfigError, MissingExtraError

PLACEMENT_TIMEOUT_S = 60.0


class CellActor:
    """Runs on the cell's node. All methods are coroutines, so that `wait` does not hold up `kill`."""

    def __init__(self) -> None:
        self._runtime = LocalRuntime(Path(tempfile.mkdtemp(prefix="gyre-cell-")))
        self._cell: LocalCell | None = None

    async def start(self, spec: bytes, timeout_s: float) -> bytes:
        """Start the cell; its ready line."""
        decoded = msgspec.json.decode(spec, type=CellSpec)
        self._cell = await self._runtime.start(_on_this_node(decoded), timeout_s)
        return msgspec.json.encode(self._cell.ready)

    async def wait(self) -> str:
        """How the cell ended."""
        return "never started" if self._cell is None else await self._cell.wait()

    async def kill(self) -> None:
        """End it now."""
        if self._cell is not None:
            await self._cell.kill()

    async def stop(self, grace_s: float) -> None:
        """Ask it to end."""
        if self._cell is not None:
            await self._cell.stop(grace_s)


def _on_this_node(spec: CellSpec) -> CellSpec:
    """Cells reach each other under their node's address when the configuration leaves it to us."""
    import ray

    weights = dict(spec.config.get("weights", {}))
    if weights.get("host") != "auto":
        return spec
    weights["host"] = ray.util.get_node_ip_address()
    return msgspec.structs.replace(spec, config={**spec.config, "weights": weights})


class RayCell:
    """A cell behind an actor."""

    def __init__(self, name: str, actor: Any, group: Any, ready: CellReady) -> None:
        self.name = name
        self._actor = actor
        self._group = group
        self._ready = ready
        self._gone: str | None = None

    @property
    def ready(self) -> CellReady:
        """What the cell said when it came up."""
        return self._ready

    async def wait(self) -> str:
        """Until the cell, its actor or its node is gone."""
        import ray

        if self._gone is None:
            try:
                how = str(await self._actor.wait.remote())
            except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
                how = f"its actor is gone: {str(error).splitlines()[0]}"
            self._gone = self._gone or how
            self._release()
        return self._gone

    async def kill(self) -> None:
        """End the process, the actor and the placement."""
        import ray

        try:
            await asyncio.wait_for(self._actor.kill.remote(), 10.0)
        except (TimeoutError, ray.exceptions.RayError):
            self._gone = self._gone or "its actor did not answer"
        self._release()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, then kill it."""
        import ray

        try:
            await asyncio.wait_for(self._actor.stop.remote(grace_s), grace_s + 10.0)
        except (TimeoutError, ray.exceptions.RayError):
            self._gone = self._gone or "its actor did not answer"
        self._release()

    def _release(self) -> None:
        import ray

        if self._group is not None:
            group, self._group = self._group, None
            ray.kill(self._actor, no_restart=True)
            ray.util.remove_placement_group(group)


class RayRuntime:
    """Joins a cluster (or starts one on this machine), and leaves it at the end. Authentication stays as Ray
    has it: on.
    """

    def __init__(self, log_dir: Path, *, address: str = "", resources: dict[str, float] | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "ray") from error
        self._ray: Any = ray
        self._resources = dict(resources or {"CPU": 1.0})
        self._cells: list[RayCell] = []
        self._joined = not ray.is_initialized()
        log_dir.mkdir(parents=True, exist_ok=True)
        if self._joined:
            try:
                ray.init(address=address or None, include_dashboard=False, log_to_driver=False, namespace="gyre")
            except ConnectionError as error:
                raise ConfigError(f"cells.ray_address = {address!r}: {str(error).splitlines()[0]}") from error

    async def start(self, spec: CellSpec, timeout_s: float) -> RayCell:
        """Place, start, wait for the ready line. Raises CellError."""
        ray = self._ray
        group = ray.util.placement_group([self._resources], strategy="STRICT_PACK", name=f"gyre-{spec.name}")
        actor = None
        try:
            await asyncio.wait_for(group.ready(), PLACEMENT_TIMEOUT_S)
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            )
            actor = (
                ray.remote(CellActor)
                .options(
                    num_cpus=self._resources.get("CPU", 0.0),
                    num_gpus=self._resources.get("GPU", 0.0),
                    scheduling_strategy=strategy,
                    max_concurrency=16,
                    max_restarts=0,
                )
                .remote()
            )
            encoded = msgspec.json.encode(spec)
            ready = await asyncio.wait_for(actor.start.remote(encoded, timeout_s), timeout_s + 30.0)
        except BaseException as error:  # cleans up and raises again
            if actor is not None:
                ray.kill(actor, no_restart=True)
            ray.util.remove_placement_group(group)
            if isinstance(error, TimeoutError):
                raise CellError(
                    f"Ray found no place for {spec.name} ({self._resources}), or it did not come up in time"
                ) from error
            if isinstance(error, ray.exceptions.RayError):
                raise CellError(f"cell {spec.name} did not come up: {_cause(error)}") from error
            raise
        cell = RayCell(spec.name, actor, group, msgspec.json.decode(ready, type=CellReady))
        self._cells.append(cell)
        return cell

    async def aclose(self) -> None:
        """End the cells; leave the cluster if we joined it."""
        cells, self._cells = self._cells, []
        await asyncio.gather(*(cell.stop() for cell in cells))
        if self._joined:
            self._ray.shutdown()


def _cause(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    return str(cause or error).splitlines()[-1]
