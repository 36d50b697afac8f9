"""Role changes of cells, in the order that loses nothing: routing first, engine second, weights third."""

from __future__ import annotations

import asyncio
import logging
import time

from gyre_backend.cells import state as s
from gyre_backend.errors import CellError
from gyre_backend.service.fleet import Cell
from gyre_backend.service.run_state import RollbackNeeded, RunState

log = logging.getLogger(__name__)

CORE_POLL_S = 0.1
RETRY_S = 1.0


async def to_training(run: RunState, index: int) -> None:
    """Rollout → training: stop routing, move its requests elsewhere, stop the engine, join the open step."""
    cell = run.fleet.cells[index]
    begun = time.monotonic()
    moved = await run.routing.drain(cell.name)
    try:
        await cell.ask().train()
        run.training.add(index)
        if run.step is not None and run.step.snapshot is not None:
            await run.step.join(cell)
    except CellError as error:
        run.training.discard(index)
        run.fleet.fail(index, str(error))
        return
    seconds = time.monotonic() - begun
    run.metrics.event("rollout to training", cell=cell.name, seconds=round(seconds, 4), moved=moved)
    run.metrics.count("move_to_training_seconds", seconds)
    log.info("%s: rollout to training in %.3f s, %d calls moved", cell.name, seconds, moved)
    run.post(s.MoveDone(run.now(), cell=index))


async def to_rollout(run: RunState, index: int) -> None:
    """Training → rollout: hand the gradient over, hold the published version, start the engine, route."""
    cell = run.fleet.cells[index]
    begun = time.monotonic()
    run.training.discard(index)
    step = run.step
    try:
        if step is not None:
            await step.leave(cell)
        async with run.weights_lock:
            await bring_to_version(run, cell)
            await cell.ask().serve()
            await run.routing.add(cell.name, cell.ask().ready.engine_url, run.version)
    except CellError as error:
        if step is not None and step is run.step:
            step.drop(cell)
        run.fleet.fail(index, str(error))
        return
    seconds = time.monotonic() - begun
    run.metrics.event("training to rollout", cell=cell.name, seconds=round(seconds, 4))
    run.metrics.count("move_to_rollout_seconds", seconds)
    log.info("%s: training to rollout in %.3f s", cell.name, seconds)
    run.post(s.MoveDone(run.now(), cell=index))


async def bring_to_version(run: RunState, cell: Cell) -> None:
    """Pull the published weights from the core if the cell holds others. Raises CellError."""
    if cell.version == run.version or cell is run.fleet.core:
        return
    manifest = await run.fleet.core.ask().publish()
    report = await cell.ask().pull(manifest)
    cell.version = report.version
    run.metrics.count("weight_bytes", report.bytes_read)
    run.metrics.count("weight_seconds", report.seconds)
    log.info(
        "%s holds version %d: %s pull of %d bytes in %.3f s",
        cell.name, report.version, report.mode, report.bytes_read, report.seconds,
    )  # fmt: skip


async def bring_back(run: RunState, index: int) -> None:
    """Replace a lost cell; it comes up in rollout with the published weights.

    Raises CellError when it can't be started, RollbackNeeded when it is the core and its version is in no
    checkpoint.
    """
    cell = run.fleet.cells[index]
    while True:
        begun = time.monotonic()
        try:
            await run.fleet.replace(index, run.checkpoint)
        except CellError as error:
            if run.fleet.restarts >= run.config.cells.max_restarts:
                raise
            log.warning("%s did not come up: %s", cell.name, error)
            await asyncio.sleep(RETRY_S)
            continue
        if index == 0 and cell.version != run.version:
            raise RollbackNeeded
        try:
            while not run.fleet.core.up:  # noqa: ASYNC110 - it may come and go several times
                await asyncio.sleep(CORE_POLL_S)
            async with run.weights_lock:
                await bring_to_version(run, cell)
                await run.routing.add(cell.name, cell.ask().ready.engine_url, run.version)
        except CellError as error:
            # It, or the core, is gone again. If it is this cell, its loss is reported on its own.
            log.warning("%s did not come back: %s", cell.name, error)
            if cell.failing or cell.client is None:
                return
            await asyncio.sleep(CORE_POLL_S)
            run.fleet.fail(index, str(error))
            return
        run.metrics.event("cell back", cell=cell.name, seconds=round(time.monotonic() - begun, 3))
        run.post(s.CellBack(run.now(), cell=index))
        return
