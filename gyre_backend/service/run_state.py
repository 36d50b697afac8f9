"""What the parts of the service share about one run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gyre_backend.cells.spec import CellReady
from gyre_backend.cells.state import Event
from gyre_backend.config import BackendConfig
from gyre_backend.ingest import Ingest
from gyre_backend.ledger import Ledger
from gyre_backend.service.fleet import Fleet
from gyre_backend.service.metrics import Metrics
from gyre_backend.service.orders import OrderBook
from gyre_backend.service.routing import Routing
from gyre_backend.service.steps import OpenStep


class RollbackNeeded(Exception):
    """The core is gone and its version is in no checkpoint: the run goes on from the last one, with all cells
    started anew.
    """


@dataclass(slots=True)
class RunState:
    """Parts and present of a run. Belongs to one event loop."""

    config: BackendConfig
    run_dir: Path
    model_dir: Path
    ledger: Ledger
    ingest: Ingest
    orders: OrderBook
    fleet: Fleet
    routing: Routing
    metrics: Metrics
    post: Callable[[Event], None]
    facts: CellReady
    """What the core said when it came up: estimator, weighting, context."""
    version: int = 0
    """Policy version that is published."""
    checkpoint: str = ""
    """Folder that a cell starts from; empty: the model itself."""
    step: OpenStep | None = None
    training: set[int] = field(default_factory=set)
    """Cells whose engine is stopped and that may compute micro-steps."""
    seconds_per_token: float = 1e-3
    """Moving average over micro-steps, for estimates of work."""
    weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the published version changes, so that no cell comes back with the old one."""

    @staticmethod
    def now() -> float:
        """The scheduler's clock, seconds."""
        return time.monotonic()
