"""What a runner needs of a gateway: open an execution, seal it. And the same without a gateway, for agents that ask no model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Protocol

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.capture.flusher import Flusher
from gyre_sdk.capture.wal import Wal
from gyre_sdk.wire.records import Opened, Outcome, Sealed


class OpenExecution(Protocol):
    """An open execution."""

    @property
    def token(self) -> str:
        """The harness's API key."""
        ...


class Recording(Protocol):
    """Where executions are recorded."""

    async def open(self, spec: ExecutionSpec) -> OpenExecution:
        """Begin one."""
        ...

    async def seal(self, execution: str, outcome: Outcome) -> None:
        """End it, once."""
        ...


class NoToken:
    """An execution that never asks a model."""

    token = ""


class ModelFreeRecording:
    """Logs of executions without calls: opened, sealed, and nothing between."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._flusher = Flusher(run_dir / "journal.gyre")
        self._logs: dict[str, Wal] = {}

    async def open(self, spec: ExecutionSpec) -> OpenExecution:
        """Begin one. Raises ConfigError for a used id, StorageError."""
        wal = Wal.create(self._run_dir / "executions" / spec.execution / "wal.gyre", self._flusher)
        self._logs[spec.execution] = wal
        opened = Opened(
            execution=spec.execution,
            at=time.time(),
            group=spec.group,
            task=spec.task,
            harness=spec.harness,
            deadline_s=spec.deadline_s,
            meta=spec.meta,
        )
        await wal.write(opened)
        return NoToken()

    async def seal(self, execution: str, outcome: Outcome) -> None:
        """End it."""
        wal = self._logs.pop(execution)
        await wal.write(Sealed(at=time.time(), outcome=outcome))
        await wal.close()

    async def aclose(self) -> None:
        """Write what is queued."""
        await asyncio.to_thread(self._flusher.close)
