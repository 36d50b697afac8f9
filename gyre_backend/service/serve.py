"""One run from configuration to last step: starts everything in order, and ends everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import uvicorn

from gyre_backend.cells import state as s
from gyre_backend.cells.policy import PolicyConfig, from_mapping
from gyre_backend.cells.runtime import CellRuntime, make_runtime
from gyre_backend.cells.spec import CellReady
from gyre_backend.config import BackendConfig
from gyre_backend.corked import server_config
from gyre_backend.ingest import Ingest
from gyre_backend.ledger import Ledger
from gyre_backend.models import model_dir
from gyre_backend.monitors import FanOut, make_monitors
from gyre_backend.service.app import Current, ServiceApp
from gyre_backend.service.driver import Driver
from gyre_backend.service.fleet import Fleet
from gyre_backend.service.last_look import last_look
from gyre_backend.service.metrics import Metrics
from gyre_backend.service.orders import OrderBook
from gyre_backend.service.routing import Routing, make_routing
from gyre_backend.service.run_state import RollbackNeeded, RunState
from gyre_sdk.errors import ConfigError, GyreError

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long the service stays up after `stop`, so that the runner reads it and the last status."""


@dataclass(slots=True)
class Service:
    """The parts that outlive a rollback."""

    config: BackendConfig
    run_dir: Path
    policy: PolicyConfig
    ledger: Ledger
    ingest: Ingest
    orders: OrderBook
    routing: Routing
    metrics: Metrics
    current: Current
    model: Path


def policy_config(config: BackendConfig) -> PolicyConfig:
    """The scheduler's settings: the preset, `[scheduler] options`, and the batch sizes of `[train]`. Raises
    ConfigError.
    """
    table = {
        **config.scheduler.options,
        "preset": config.scheduler.preset,
        "groups_per_step": config.train.groups_per_step,
        "group_size": config.train.group_size,
    }
    policy = from_mapping(table)
    policy.check_cells(config.cells.count, 0)
    return policy


def build(config: BackendConfig, run_dir: Path) -> Service:
    """Everything but the cells. Raises ConfigError for settings that do not fit, before anything is
    started.
    """
    policy = policy_config(config)
    model = model_dir(config.model.path, say=log.info)
    run_dir.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(run_dir / "ledger.sqlite")
    current = Current()
    ingest = Ingest(
        run_dir / "frames",
        admit=lambda opened: current.get().intake.admit(opened),
        on_opened=lambda graph: current.get().intake.opened(graph),
        on_sealed=lambda graph: current.get().sealed(graph),
    )
    return Service(
        config=config,
        run_dir=run_dir,
        policy=policy,
        ledger=ledger,
        ingest=ingest,
        orders=OrderBook(ledger, config.train),
        routing=make_routing(config.router),
        metrics=Metrics(run_dir, _monitors(config, run_dir)),
        current=current,
        model=model,
    )


def _monitors(config: BackendConfig, run_dir: Path) -> FanOut:
    table = config.monitors
    settings = config.model_dump(mode="json")
    return make_monitors(
        table.use, run_dir, project=table.project, name=table.name, config=settings, options=table.options
    )


async def train(service: Service) -> str:
    """Drive the run until it ends; a rollback starts all cells anew from the last checkpoint. Returns why it
    ended.
    """
    while True:
        runtime = make_runtime(service.config.cells, service.run_dir)
        try:
            return await _drive(service, runtime)
        except RollbackNeeded:
            log.warning("the core's weights are lost; the run goes back to its last checkpoint")
            service.metrics.event("rollback")
        finally:
            service.current.driver = None
            await runtime.aclose()


async def _drive(service: Service, runtime: CellRuntime) -> str:
    version, checkpoint = service.ledger.recover()
    service.metrics.rewind([row.metrics for row in service.ledger.steps()])
    posts: list[s.Event] = []
    fleet = Fleet(
        service.config,
        runtime,
        service.model,
        service.run_dir,
        lambda index, why: service.current.get().cell_lost(index, why),
    )
    try:
        facts = await fleet.start_all(checkpoint or "")
        run = _run_state(service, fleet, facts, version, checkpoint or "", posts.append)
        driver = Driver(run, service.policy)
        run.post = driver.post
        for cell in fleet.cells:
            await service.routing.add(cell.name, cell.ask().ready.engine_url, version)
        service.current.driver = driver
        try:
            reason = await driver.run()
        except GyreError as error:
            service.orders.stop(f"error: {error}")
            await _until_read(service)
            raise
        await last_look(run, driver)
        if version != run.version or not (service.run_dir / "model").exists():
            await _export(run)
        service.orders.stop(reason)
        await _until_read(service)
        return reason
    finally:
        for cell in fleet.cells:
            service.routing.lost(cell.name)
        await fleet.aclose()


def _run_state(service: Service, fleet: Fleet, facts: CellReady, version: int, checkpoint: str, post: Any) -> RunState:
    return RunState(
        config=service.config,
        run_dir=service.run_dir,
        model_dir=service.model,
        ledger=service.ledger,
        ingest=service.ingest,
        orders=service.orders,
        fleet=fleet,
        routing=service.routing,
        metrics=service.metrics,
        post=post,
        facts=facts,
        version=version,
        checkpoint=checkpoint,
    )


async def _export(run: RunState) -> None:
    """The trained model as a Hugging Face folder, RUN/model."""
    if run.version == 0 or not run.fleet.core.up:
        return
    target = run.run_dir / "model"
    with contextlib.suppress(FileNotFoundError):
        await anyio.to_thread.run_sync(_remove, target)
    await run.fleet.core.ask().export(target)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


async def _until_read(service: Service) -> None:
    """Stay up for a moment: the runner still has to read that it is over."""
    if service.orders.slots:
        await service.orders.all_read(LAST_WORDS_S)
        await asyncio.sleep(1.0)


async def serve(config: BackendConfig, run_dir: Path, token: str, host: str, port: int, *, keep_serving: bool) -> None:
    """Start, print the ready line, train, end. Raises GyreError."""
    service = await anyio.to_thread.run_sync(build, config, run_dir)
    listener = _listen(host, port)
    app = ServiceApp(service.current, service.ingest, service.routing, token)
    app.url = f"http://{host}:{listener.getsockname()[1]}"
    server = uvicorn.Server(server_config(app.app(), timeout_graceful_shutdown=1))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    training = asyncio.create_task(train(service))
    serving = asyncio.create_task(_serve(server, listener))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, training.cancel)
    try:
        await _announce(service, training, app.url)
        reason = await training
        log.info("done: %s", reason)
        if keep_serving:
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        log.info("told to end")
    finally:
        if not training.done():
            training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await service.routing.aclose()
        service.ledger.close()
        await anyio.to_thread.run_sync(service.metrics.close)


async def _announce(service: Service, training: asyncio.Task[str], url: str) -> None:
    """The ready line, once the cells are up; if they do not come up, their error."""
    while service.current.driver is None:
        if training.done():
            training.result()
            return
        await asyncio.wait({training}, timeout=0.05)
    sys.stdout.write(msgspec.json.encode({"ready": True, "url": url}).decode() + "\n")
    sys.stdout.flush()


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    await server.serve([listener])


def _listen(host: str, port: int) -> socket.socket:
    # Without the protocol, asyncio leaves Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from error
    return listener


def first_error(group: BaseException) -> GyreError | None:
    """The first of our own errors inside an exception (group)."""
    if isinstance(group, GyreError):
        return group
    if isinstance(group, BaseExceptionGroup):
        return next((found for e in group.exceptions if (found := first_error(e)) is not None), None)
    return None
