"""Cells on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.anyio, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[object]:
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine takes its time
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        made.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
        made.second = made.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield made
    finally:
        made.shutdown()


async def test_lifecycle_on_two_nodes(cluster: object, tmp_path: Path) -> None:
    from gyre_backend.cells.client import CellClient
    from gyre_backend.cells.runtime.ray import RayRuntime
    from gyre_backend.cells.spec import CellSpec
    from gyre_backend.config import parse_config
    from gyre_backend.errors import CellError
    from gyre_backend.models import tiny_dir

    model = tiny_dir(tmp_path / "tiny", hidden=32, layers=1)
    config = parse_config({"model": {"path": str(model), "dtype": "float64"}, "cells": {"count": 2}})

    def spec(index: int, **changes: str) -> CellSpec:
        fields = {"model_dir": str(model), **changes}
        return CellSpec(
            name=f"cell{index}",
            index=index,
            config=config.model_dump(mode="json"),
            run_dir=str(tmp_path),
            token="t",
            **fields,
        )

    runtime = RayRuntime(tmp_path / "cells", address=cluster.address)  # type: ignore[attr-defined]
    try:
        cells = await asyncio.gather(runtime.start(spec(0), 400.0), runtime.start(spec(1), 400.0))
        import ray

        used = {bundle["bundles_to_node_id"][0] for bundle in ray.util.placement_group_table().values()}
        assert len(used) == 2, "one cell per node"
        clients = [CellClient(f"cell{i}", cell.ready, "t", call_s=60, long_s=60) for i, cell in enumerate(cells)]
        manifest = await clients[0].publish()
        assert (await clients[1].pull(manifest)).version == 0

        os.kill(cells[0].ready.pid, signal.SIGKILL)
        assert "SIGKILL" in await asyncio.wait_for(cells[0].wait(), 30)
        with pytest.raises(CellError, match="did not come up"):
            await runtime.start(spec(0, model_dir=str(tmp_path / "nothing")), 200.0)
        again = await runtime.start(spec(0), 400.0)
        assert again.ready.pid != cells[0].ready.pid

        waiting = asyncio.create_task(cells[1].wait())
        cluster.remove_node(cluster.second, allow_graceful=False)  # type: ignore[attr-defined]
        how = await asyncio.wait_for(waiting, 60)
        assert how
        for _ in range(100):
            if not Path(f"/proc/{cells[1].ready.pid}").exists():
                break
            await asyncio.sleep(0.1)
        for client in clients:
            await client.aclose()
    finally:
        await runtime.aclose()
    for _ in range(100):
        if not Path(f"/proc/{again.ready.pid}").exists():
            break
        await asyncio.sleep(0.1)
    assert not Path(f"/proc/{again.ready.pid}").exists(), "the cell outlived the runtime"
