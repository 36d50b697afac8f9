"""The gateway of a run: a process of its own, with its stream to a backend if there is one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from gyre_sdk.capture.config import GatewayConfig, PinnedSampling
from gyre_sdk.harness.config import SamplingConfig
from gyre_sdk.serving import GatewayProcess, GatewaySettings

DRAIN_S = 30.0
"""How long a run's end waits for the backend to take the last records; they stay on disk in any case."""


@asynccontextmanager
async def open_gateway(
    run_dir: Path,
    model_dir: Path,
    engine_url: str,
    sampling: SamplingConfig,
    *,
    backend: tuple[str, str] | None = None,
) -> AsyncIterator[tuple[GatewayProcess, int]]:
    """A serving gateway and its port; should its process die, another goes on with every execution, on the same port.

    backend: (url, admin token); records are streamed there until all are acknowledged. Executions that an earlier run
    in the folder left open are sealed as cancelled: their harnesses ended with it.

    Raises ConfigError, EngineGoneError when the engine can't be reached.
    """
    config = GatewayConfig(
        sampling=PinnedSampling(
            temperature=sampling.temperature, top_p=sampling.top_p, max_new_tokens=sampling.max_new_tokens
        ),
        metrics_token=os.environ.get("GYRE_METRICS_TOKEN", ""),
    )
    settings = GatewaySettings(
        run_dir=str(run_dir),
        model_dir=str(model_dir),
        engine_url=engine_url,
        engine_token=backend[1] if backend else None,
        config=config,
        backend=backend,
        unsealed="cancel",
    )
    async with watched(GatewayProcess(settings)) as gateway:
        yield gateway, gateway.port
        if backend is not None:
            await gateway.drain(DRAIN_S)


@asynccontextmanager
async def watched(gateway: GatewayProcess) -> AsyncIterator[GatewayProcess]:
    """Enter a gateway process; the block is cancelled, and the reason raised, when it can't be kept alive."""
    async with gateway:
        with anyio.CancelScope() as scope:

            async def give_up() -> None:
                await gateway.failed()
                scope.cancel()

            watch = asyncio.create_task(give_up())
            try:
                yield gateway
            finally:
                watch.cancel()
        if scope.cancelled_caught and gateway.failure is not None:
            raise gateway.failure
