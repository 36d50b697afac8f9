"""What the service needs of a router, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from starlette.routing import BaseRoute

if TYPE_CHECKING:
    from gyre_backend.config import RouterTable


class Routing(Protocol):
    """One `/generate` front for all cells. Cells are known by name."""

    def routes(self) -> list[BaseRoute]:
        """SGLang's contract, to be mounted by the service."""
        ...

    async def add(self, cell: str, url: str, version: int) -> None:
        """Send requests to this cell's engine from now on."""
        ...

    async def drain(self, cell: str) -> int:
        """Send it nothing more, and move what runs there elsewhere; returns how many requests were moved."""
        ...

    def lost(self, cell: str) -> None:
        """The engine is gone: what ran there goes on elsewhere."""
        ...

    def published(self, version: int) -> None:
        """Cells in rollout serve this version now."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Requests, moves, tokens computed again, waits ... since the start."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


def make_routing(table: RouterTable) -> Routing:
    """The router with its settings."""
    from gyre_backend.router import Router, RouterConfig

    return Router(
        RouterConfig(
            max_waiting=table.max_waiting,
            queue_s=table.queue_s,
            retries=table.retries,
            reserve_s=table.reserve_s,
            abort_s=table.abort_s,
            migrator=table.kv_migration,
        )
    )
