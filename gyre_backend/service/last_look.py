"""After the last step: a few groups from the trained policy, so that a run ends with a look at what it
made.
"""

from __future__ import annotations

import asyncio
import logging

from gyre_backend.cells import state as s
from gyre_backend.service.driver import Driver
from gyre_backend.service.moves import to_rollout
from gyre_backend.service.run_state import RunState

log = logging.getLogger(__name__)

POLL_S = 0.2


async def last_look(run: RunState, driver: Driver) -> None:
    """Order `train.final_groups` groups with the last policy version and wait until they have ended.

    They are groups like any other: when the run is gone on with, it trains on them first.
    """
    if not run.config.train.final_groups or not run.version:
        return
    for cell, known in zip(run.fleet.cells, driver.state.cells, strict=True):
        if known.role is not s.Role.ROLLOUT and cell.up:
            await to_rollout(run, cell.index)
    groups = [run.orders.dispatch_group(run.version) for _ in range(run.config.train.final_groups)]
    log.info("last look: %d groups with version %d", len(groups), run.version)
    while not all(all(run.ledger.outcomes(group).values()) for group in groups):  # noqa: ASYNC110 - the ledger has no bell
        await asyncio.sleep(POLL_S)
