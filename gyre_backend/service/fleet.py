"""The cells of a run: started, watched (exit and heartbeat), killed when they hang, replaced."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gyre_backend.cells.client import CellClient
from gyre_backend.cells.runtime import CellHandle, CellRuntime
from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_backend.config import BackendConfig
from gyre_backend.errors import CellError

log = logging.getLogger(__name__)

LAG_S = 2.0
"""A question that took so much longer than its time-out says that this process was stopped (or its machine asleep)."""


@dataclass(slots=True)
class Cell:
    """One cell as the service sees it. `client` is None while there is no process."""

    index: int
    handle: CellHandle | None = None
    client: CellClient | None = None
    version: int = -1
    """Policy version it holds, as far as we know."""
    busy_s: float = 0.0
    """Seconds of micro-steps since the start."""
    restarts: int = 0
    failing: str = ""
    """Why it is being taken down; empty while it is fine."""
    failed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    watch: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """`cell0` is the core."""
        return f"cell{self.index}"

    @property
    def up(self) -> bool:
        """Whether it can be asked for anything."""
        return self.client is not None and not self.failing

    def ask(self) -> CellClient:
        """Its client. Raises CellError when it is gone."""
        if self.client is None or self.failing:
            raise CellError(f"cell {self.name} is gone{': ' + self.failing if self.failing else ''}")
        return self.client


class Fleet:
    """All cells. `on_lost(index, why)` is called once per loss, when the process is gone for certain."""

    def __init__(
        self,
        config: BackendConfig,
        runtime: CellRuntime,
        model_dir: Path,
        run_dir: Path,
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.config = config
        self.cells = [Cell(index) for index in range(config.cells.count)]
        self._runtime = runtime
        self._model_dir = model_dir
        self._run_dir = run_dir
        self._on_lost = on_lost
        self._token = secrets.token_urlsafe(24)
        self._closing = False
        self.restarts = 0

    @property
    def core(self) -> Cell:
        """The cell that owns the optimizer."""
        return self.cells[0]

    async def start(self, index: int, checkpoint: str) -> CellReady:
        """Bring one cell up from a checkpoint (empty: the model as it is). Raises CellError."""
        cell = self.cells[index]
        table = self.config.cells
        begun = time.monotonic()
        spec = CellSpec(
            name=cell.name,
            index=index,
            model_dir=str(self._model_dir),
            config=self.config.model_dump(mode="json"),
            run_dir=str(self._run_dir),
            token=self._token,
            checkpoint=checkpoint,
            env=table.env,
        )
        cell.handle = await self._runtime.start(spec, table.start_timeout_s)
        ready = cell.handle.ready
        cell.client = CellClient(
            cell.name, ready, self._token, call_s=table.call_timeout_s, long_s=table.micro_timeout_s
        )
        cell.version, cell.failing, cell.failed = ready.version, "", asyncio.Event()
        cell.watch = asyncio.create_task(self._watch(cell), name=f"watch-{cell.name}")
        log.info("%s is up: pid %d, %s, %.1f s", cell.name, ready.pid, ready.url, time.monotonic() - begun)
        return ready

    async def start_all(self, checkpoint: str) -> CellReady:
        """Bring every cell up; returns what the core said."""
        ready = await asyncio.gather(*(self.start(cell.index, checkpoint) for cell in self.cells))
        return ready[0]

    def fail(self, index: int, why: str) -> None:
        """Take a cell down: it answered wrong, or not at all. `on_lost` follows."""
        cell = self.cells[index]
        if cell.failing or cell.handle is None:
            return
        cell.failing = why
        cell.failed.set()
        log.warning("%s is taken down: %s", cell.name, why)

    async def _watch(self, cell: Cell) -> None:
        """Until the cell is gone, by itself or because it was failed or does not answer."""
        assert cell.handle is not None
        assert cell.client is not None
        handle, client = cell.handle, cell.client
        gone = asyncio.create_task(handle.wait())
        failed = asyncio.create_task(cell.failed.wait())
        try:
            await self._until_gone(cell, client, gone, failed)
            if not gone.done():
                await handle.kill()
            how = await gone
        finally:
            gone.cancel()
            failed.cancel()
        if self._closing:
            return
        why = cell.failing or how
        cell.failing, cell.client, cell.handle, cell.version = why, None, None, -1
        await client.aclose()
        log.warning("%s is lost: %s", cell.name, why)
        self._on_lost(cell.index, why)

    async def _until_gone(
        self, cell: Cell, client: CellClient, gone: asyncio.Task[str], failed: asyncio.Task[Literal[True]]
    ) -> None:
        """Ask how it is, again and again, until it has ended, was failed, or has not answered for
        `hang_s`.
        """
        table = self.config.cells
        last_answer = time.monotonic()
        while not cell.failing:
            await asyncio.wait({gone, failed}, timeout=table.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or failed.done():
                return
            asked = time.monotonic()
            asking = asyncio.create_task(client.status(table.hang_s))
            await asyncio.wait({gone, failed, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                asking.cancel()
                return
            error = asking.exception()
            if error is None:
                last_answer = time.monotonic()
            elif not isinstance(error, CellError):
                raise error
            elif time.monotonic() - asked > table.hang_s + LAG_S:
                last_answer = time.monotonic()  # it is we who were stopped: the answer had no chance
            elif time.monotonic() - last_answer >= table.hang_s:
                self.fail(cell.index, str(error))

    async def replace(self, index: int, checkpoint: str) -> CellReady:
        """Start a lost cell again. Raises CellError when it does not come up, or too many were replaced."""
        cell = self.cells[index]
        if self.restarts >= self.config.cells.max_restarts:
            raise CellError(f"{self.restarts} cells were replaced already (cells.max_restarts): giving up")
        self.restarts += 1
        cell.restarts += 1
        return await self.start(index, checkpoint)

    async def aclose(self) -> None:
        """End all cells."""
        self._closing = True
        await self._runtime.aclose()
        for cell in self.cells:
            if cell.watch is not None:
                cell.watch.cancel()
            if cell.client is not None:
                await cell.client.aclose()
