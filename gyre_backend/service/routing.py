"""What the service needs of a router, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from starlette.routing import BaseRoute


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


def make_routing() -> Routing:
    """The router."""
    from gyre_backend.service.plain_routing import PlainRouting

    return PlainRouting()
