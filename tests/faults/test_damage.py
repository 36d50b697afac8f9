"""Logs that are cut or have a bit flipped anywhere, under a gateway that starts on them."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from gyre_sdk.capture.gateway import Gateway, GatewayConfig
from gyre_sdk.capture.wal import read_records
from gyre_sdk.graph import BranchGraph
from gyre_sdk.testing import Say
from gyre_sdk.wire.records import Outcome
from tests.gateway.conftest import Rig, make_rig

pytestmark = pytest.mark.anyio
CONFIG = GatewayConfig(partial_every_s=0.0)


async def spoken(rig: Rig, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn}"})
        messages.append(await rig.chat(messages))
    return messages


async def start_on(rig: Rig, folder: Path, data: bytes) -> tuple[Gateway, Path]:
    """A new gateway on a run whose log is `data`."""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder / "executions" / rig.handle.execution / "wal.gyre"
    log.parent.mkdir(parents=True)
    log.write_bytes(data)
    return Gateway(rig.engine, rig.renderer, folder, CONFIG), log


@pytest.mark.parametrize("cuts", [25, pytest.param(400, marks=[pytest.mark.faults, pytest.mark.timeout(300)])])
async def test_a_log_that_was_cut_goes_on(tmp_path: Path, cuts: int) -> None:
    random = Random(cuts)
    async with make_rig(tmp_path, [Say("some words of a reply", chunk=2)], config=CONFIG) as rig:
        messages = await spoken(rig, 3)
        wal = rig.handle.recorder._wal
        await wal.durable(wal.next_seq - 1)
        whole = wal.path.read_bytes()
        full = list(read_records(wal.path))
        for _ in range(cuts):
            gateway, log = await start_on(rig, tmp_path / "cut", whole[: random.randint(300, len(whole))])
            kept = list(read_records(log))
            (handle,) = await gateway.recover()
            assert kept == full[: len(kept)]
            assert not gateway.damaged
            async with gateway.serving() as url, httpx.AsyncClient(base_url=url, headers=rig.http.headers) as http:
                body = {"messages": [*messages, {"role": "user", "content": "and now?"}]}
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
                await gateway.seal(handle.execution, Outcome(status="completed"))
            after = list(read_records(log))
            assert after[: len(kept)] == kept
            assert BranchGraph.replay(after).digest() == handle.graph.digest()


@pytest.mark.parametrize("flips", [40, pytest.param(1500, marks=[pytest.mark.faults, pytest.mark.timeout(300)])])
async def test_a_flipped_bit_is_never_believed(tmp_path: Path, flips: int) -> None:
    random = Random(flips)
    async with make_rig(tmp_path, [Say("some words of a reply", chunk=2)], config=CONFIG) as rig:
        await spoken(rig, 3)
        wal = rig.handle.recorder._wal
        await wal.durable(wal.next_seq - 1)
        whole = wal.path.read_bytes()
        full = list(read_records(wal.path))
        for _ in range(flips):
            data = bytearray(whole)
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            gateway, log = await start_on(rig, tmp_path / "flip", bytes(data))
            handles = await gateway.recover()
            if handles:
                # The length of the last frame was hit: it looks like a torn tail, and is cut as one.
                await gateway.aclose()
                kept = [record for record in read_records(log) if getattr(record, "name", "") != "recovered"]
                assert kept == full[: len(kept)]
                assert len(kept) >= len(full) - 1
            else:
                assert set(gateway.damaged) == {rig.handle.execution}
                assert log.read_bytes() == data, "nothing is cut without being asked for"
                await gateway.seal(rig.handle.execution, Outcome(status="completed"))
                await gateway.aclose()
