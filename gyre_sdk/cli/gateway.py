"""The gateway of a run, with its stream to a backend if there is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gyre_sdk.capture.config import GatewayConfig, PinnedSampling
from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.harness.config import SamplingConfig
from gyre_sdk.sampling import SGLangClient
from gyre_sdk.stream import FrameSender

if TYPE_CHECKING:
    from gyre_sdk.capture.wal import Wal

DRAIN_S = 30.0
"""How long a run's end waits for the backend to take the last records; they stay on disk in any case."""


class _Streamed:
    """Every log that the gateway opens is followed by the sender, as far as it is on disk."""

    def __init__(self, sender: FrameSender) -> None:
        self._sender = sender

    def opened(self, execution: str, wal: Wal) -> None:
        self._sender.opened(execution, wal.path)
        wal.listen(lambda seq, offset: self._sender.advanced(execution, seq, offset))
        self._sender.advanced(execution, wal.durable_seq, wal.durable_offset)


@asynccontextmanager
async def open_gateway(
    run_dir: Path,
    model_dir: Path,
    engine_url: str,
    sampling: SamplingConfig,
    *,
    backend: tuple[str, str] | None = None,
) -> AsyncIterator[tuple[Gateway, int]]:
    """A serving gateway and its port. `backend` = (url, admin token): frames are streamed there until all are acknowledged.

    Raises ConfigError, EngineGoneError when the engine can't be reached.
    """
    config = GatewayConfig(
        sampling=PinnedSampling(
            temperature=sampling.temperature, top_p=sampling.top_p, max_new_tokens=sampling.max_new_tokens
        )
    )
    async with AsyncExitStack() as stack:
        client = SGLangClient(engine_url, token=backend[1] if backend else None)
        stack.push_async_callback(client.aclose)
        sender = FrameSender(*backend) if backend is not None else None
        if sender is not None:
            await stack.enter_async_context(sender)
        sink = _Streamed(sender) if sender is not None else None
        gateway = Gateway(client, load_renderer(model_dir), run_dir, config, sink)
        await gateway.model_info()
        url = await stack.enter_async_context(gateway.serving())
        yield gateway, urlsplit(url).port or 80
        if sender is not None:
            await sender.drain(DRAIN_S)
