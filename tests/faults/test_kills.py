"""kill -9 of gateway, ingest, engine and harnesses at seeded random moments while executions run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.world import World

pytestmark = pytest.mark.anyio


async def test_each_is_killed_once(tmp_path: Path) -> None:
    world = World(tmp_path, seed=1, slots=3, turns=4)
    await world.run({"gateway": 1, "ingest": 1, "engine": 1, "harness": 1}, pause_s=0.4)
    assert sum(world.killed.values()) == 4
    world.check()


@pytest.mark.faults
@pytest.mark.timeout(420)
@pytest.mark.parametrize("seed", [11, 12, 13, 14])
async def test_fifty_kills(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed=seed)
    await world.run({"gateway": 16, "ingest": 12, "engine": 12, "harness": 10}, pause_s=0.5)
    assert sum(world.killed.values()) == 50
    world.check()
