"""The gateway process: `python -m gyre_sdk.serving`, settings on stdin. Goes on with whatever an earlier one left open.

It ends, in order, when its stdin does; the calls that run then are on disk and go on in the next one.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.capture.wal import Wal
from gyre_sdk.errors import GyreError
from gyre_sdk.sampling import SGLangClient
from gyre_sdk.serving.admin import admin_routes
from gyre_sdk.serving.settings import GatewaySettings
from gyre_sdk.stream import FrameSender
from gyre_sdk.wire.records import Outcome

log = logging.getLogger("gyre.serving")
STREAMED = ".streamed"
"""Suffix of an empty file beside a sealed log: the backend has all of it."""
LEFT_OPEN = "the run was stopped before the execution ended"
_PR_SET_PDEATHSIG = 1


class Streamed:
    """Every log that the gateway opens is followed by the sender, as far as it is on disk."""

    def __init__(self, sender: FrameSender) -> None:
        self._sender = sender

    def opened(self, execution: str, wal: Wal) -> None:
        """A log exists, new or found again."""
        self._sender.opened(execution, wal.path)
        wal.listen(lambda seq, offset: self._sender.advanced(execution, seq, offset))
        self._sender.advanced(execution, wal.durable_seq, wal.durable_offset)


async def serve(settings: GatewaySettings) -> None:
    """Recover, serve, stream, until stdin ends or SIGTERM comes. Prints one ready line."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    watch = asyncio.create_task(_stdin_ends(stop))
    run_dir = Path(settings.run_dir)
    async with AsyncExitStack() as stack:
        client = SGLangClient(settings.engine_url, token=settings.engine_token)
        stack.push_async_callback(client.aclose)
        sender = None
        if settings.backend is not None:
            sender = FrameSender(*settings.backend, on_done=lambda execution: _mark_streamed(run_dir, execution))
            await stack.enter_async_context(sender)
        sink = Streamed(sender) if sender is not None else None
        renderer = await asyncio.to_thread(load_renderer, Path(settings.model_dir), settings.family)
        gateway = Gateway(client, renderer, run_dir, settings.config, sink)
        handles = await gateway.recover()
        if settings.unsealed == "cancel":
            for handle in handles:
                await gateway.seal(handle.execution, Outcome(status="cancelled", message=LEFT_OPEN))
        if sender is not None:
            _send_the_rest(sender, gateway, run_dir)
        listener = socket.socket(fileno=settings.listener)
        routes = admin_routes(gateway, settings.admin_token, sender)
        url = await stack.enter_async_context(
            gateway.serving(settings.host, tls=settings.tls, listener=listener, routes=routes)
        )
        ready = {"ready": True, "url": url, "recovered": [handle.execution for handle in handles]}
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()
    watch.cancel()


def _send_the_rest(sender: FrameSender, gateway: Gateway, run_dir: Path) -> None:
    """Logs that were sealed before the backend had all of them."""
    for path in sorted(run_dir.glob("executions/*/wal.gyre")):
        known = path.parent.name in gateway.executions() or path.parent.name in gateway.damaged
        if not known and not path.with_suffix(STREAMED).exists():
            sender.resume(path.parent.name, path, sealed=True)


def _mark_streamed(run_dir: Path, execution: str) -> None:
    """A hint that saves the next process a question; nothing depends on it."""
    try:
        (run_dir / "executions" / execution / "wal.gyre").with_suffix(STREAMED).touch()
    except OSError as error:
        log.warning("execution %s: %s", execution, error)


async def _stdin_ends(stop: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass
    stop.set()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _settings() -> GatewaySettings:
    """The first line of stdin, byte by byte: what follows belongs to the watch."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(
                "error: no settings on stdin; this process is started by `gyre run`, `train` and `gateway`"
            )
        line += byte
    return msgspec.json.decode(line, type=GatewaySettings)


def main() -> None:
    """Exit code 2, and one line on stderr, for what its user can mend."""
    _die_with_parent()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(_settings()))
    except GyreError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
