"""The end of a step: gradients together, optimizer, checkpoint, ledger, publication; in that order."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from gyre_backend.cells.client import CellRefused
from gyre_backend.errors import CellError, TrainingError
from gyre_backend.service.fleet import Cell
from gyre_backend.service.metrics import step_row
from gyre_backend.service.moves import bring_to_version
from gyre_backend.service.run_state import RunState
from gyre_backend.service.steps import OpenStep
from gyre_backend.trainers.base import StepResult

log = logging.getLogger(__name__)


async def close_step(run: RunState, step: OpenStep) -> bool:
    """True when version `step + 1` is published; False when a cell's gradient was lost and its micro-steps
    are open again.

    Raises CellError when the core is gone before the step was committed; TrainingError when the step can't be
    taken.
    """
    begun = time.monotonic()
    if not await gather_gradients(run, step):
        return False
    step.close()
    collected = time.monotonic()
    async with run.weights_lock:
        result = await _optimizer_step(run, step)
        stepped = time.monotonic()
        checkpoint, digest = await _checkpoint(run, result.version)
        saved = time.monotonic()
        seconds = {
            "train": collected - step.opened,
            "collect": collected - begun,
            "optimizer": stepped - collected,
            "checkpoint": saved - stepped,
            "micro": sum(r.seconds for r in step.results.values()),
        }
        row = step_row(step, result, seconds)
        leases = [(n, lease.lease, lease.cell, lease.epoch) for n, lease in sorted(step.leases.items())]
        run.ledger.commit_step(step.step, checkpoint=checkpoint or None, digest=digest, leases=leases, metrics=row)
        run.version = result.version
        run.checkpoint = checkpoint or run.checkpoint
        await _publish(run)
    row["publish_seconds"] = round(time.monotonic() - saved, 4)
    row["seconds"] = round(time.monotonic() - step.opened, 4)
    run.metrics.step(row)
    _remember_speed(run, step)
    _prune(run)
    return True


async def gather_gradients(run: RunState, step: OpenStep) -> bool:
    """Whether the core holds every micro-step's gradient. If not, the rest is open again and the cells in training are at it.

    Raises CellError when the core is gone.
    """
    for cell, error in await step.collect_all():
        log.warning("the gradient of %s is dropped: %s", cell.name, error)
        run.metrics.event("gradient dropped", cell=cell.name, why=str(error))
        step.drop(cell)
        run.fleet.fail(cell.index, f"its gradient could not be had: {error}")
    if step.all_collected():
        return True
    for index in sorted(run.training - {0}):
        cell = run.fleet.cells[index]
        try:
            if cell.up:
                await step.join(cell)
        except CellError as error:
            run.fleet.fail(index, str(error))
    return False


async def _optimizer_step(run: RunState, step: OpenStep) -> StepResult:
    core = run.fleet.core
    executions = sum(group.num_executions for group in step.groups.values())
    try:
        result = await core.ask().step(executions, sorted(step.book.owners()))
    except CellRefused as error:
        raise TrainingError(f"step {step.step} can't be taken: {error}") from error
    core.version = result.version
    return result


async def _checkpoint(run: RunState, version: int) -> tuple[str, str]:
    """(folder or empty, digest of the weights). The folder appears whole, before the ledger names it."""
    table = run.config.train
    due = table.checkpoint_every and version % table.checkpoint_every == 0
    if not due and version != table.steps:
        return "", (await run.fleet.core.ask().publish()).digest
    folder = run.run_dir / "checkpoints" / f"v{version:06d}"
    if folder.exists():  # from a step that was saved and then lost before the ledger knew of it
        await asyncio.to_thread(shutil.rmtree, folder)
    digest = await run.fleet.core.ask().save(folder)
    return str(folder), digest


async def _publish(run: RunState) -> None:
    """Every cell that is up serves, or trains from, the new version. One that can't is taken down; the step
    stands either way.
    """

    async def one(cell: Cell) -> None:
        try:
            if cell is run.fleet.core and cell.index not in run.training:
                await cell.ask().serve()
            else:
                await bring_to_version(run, cell)
        except CellError as error:
            run.fleet.fail(cell.index, f"it could not take version {run.version}: {error}")

    await asyncio.gather(*(one(cell) for cell in run.fleet.cells if cell.up))
    run.routing.published(run.version)


def _remember_speed(run: RunState, step: OpenStep) -> None:
    tokens = sum(result.tokens for result in step.results.values())
    if tokens:
        latest = sum(result.seconds for result in step.results.values()) / tokens
        run.seconds_per_token += 0.5 * (latest - run.seconds_per_token)


def _prune(run: RunState) -> None:
    """Keep the newest checkpoints, and never remove the one that a restart would take."""
    folder = run.run_dir / "checkpoints"
    found = sorted(path for path in folder.glob("v[0-9]*") if path.is_dir())
    for path in found[: -run.config.train.keep_checkpoints]:
        if path != Path(run.checkpoint):
            shutil.rmtree(path, ignore_errors=True)
