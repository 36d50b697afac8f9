"""The service as a process, with real cells and a scripted runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gyre_backend.ledger import Ledger
from gyre_sdk.wire.prometheus import CONTENT_TYPE
from tests.service.runner import TOKEN, Runner, backend

pytestmark = pytest.mark.anyio


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(580)
async def test_one_cell_trains_and_samples_what_it_trained(write_config: Callable[..., Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    monitors = {"use": ["tests.monitors.filing:Filing"]}
    with backend(write_config(train={"steps": 3}, monitors=monitors), run_dir) as service:
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
            assert (await http.get("/v1/status")).status_code == 401
        runner = Runner(service.url)
        await runner.run()
        metrics = await metrics_text(service.url)
        code = await anyio.to_thread.run_sync(service.process.wait, 30)
    assert code == 0
    assert runner.errors == []
    assert runner.reason == "3 optimizer steps done"
    assert runner.status["policy_version"] == 3
    assert runner.versions >= {0, 1, 2}
    page = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    assert page["gyre_policy_version"][0].value == 3
    assert page["gyre_router_requests"][0].value >= 24
    steps = rows(run_dir)
    assert [row["policy_version"] for row in steps] == [1, 2, 3]
    *filed, last = [json.loads(line) for line in (run_dir / "filed.jsonl").read_text().splitlines()]
    assert [(number, at, values["reward"]) for number, at, values in filed] == [
        (row["step"], row["at"], row["reward"]) for row in steps
    ]
    assert last == "closed"
    for row in steps:
        assert row["executions"] == 8
        assert row["trained_tokens"] == 8 * 3 * 12
        assert row["reward"] == 0.5
        assert row["grad_norm"] > 0
        assert row["staleness_max"] <= 1
        assert row["staleness"] > 0 or row["logp_gap_abs"] < 1e-4, (
            "the trainer does not see the logprobs that the engine sampled with"
        )
    assert (run_dir / "model" / "config.json").is_file()
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.versions() == [1, 2, 3]
    assert sorted(g.step for g in ledger.groups("trained") if g.step is not None) == [0, 0, 1, 1, 2, 2]
    ledger.close()


async def metrics_text(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        answer = await http.get("/v1/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.headers["content-type"] == CONTENT_TYPE
        return answer.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", ["colocate", "gyre"])
async def test_three_cells_train_like_one(preset: str, write_config: Callable[..., Path], tmp_path: Path) -> None:
    """Fixed data in fixed order: the loss trajectory does not depend on who computed what."""
    train = {"steps": 4, "groups_per_step": 4, "data_order": "dispatched", "micro_tokens": 60}
    # The tiny model's work is over before a satellite would be worth its move: without the backlog gate they come all the same.
    options = {"backlog_trips": 0.0, "look_ahead": False} if preset == "gyre" else {}
    losses = {}
    for count in (1, 3):
        run_dir = tmp_path / f"run{count}"
        scheduler = {"preset": preset, "options": options} if count == 3 else {"preset": "colocate"}
        config = write_config(f"k{count}", train=train, cells={"count": count}, scheduler=scheduler)
        with backend(config, run_dir) as service:
            runner = Runner(service.url, fixed=True)
            await runner.run()
        assert runner.errors == []
        steps = rows(run_dir)
        losses[count] = [(row["loss"], row["grad_norm"]) for row in steps]
        if count == 3:
            assert any(len(row["cells"]) > 1 for row in steps), "no satellite ever took part"
            assert sum(row["gradient_bytes"] for row in steps) > 0
    assert len(losses[1]) == len(losses[3]) == 4
    for alone, together in zip(losses[1], losses[3], strict=True):
        assert together == pytest.approx(alone, rel=0, abs=1e-9)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"group_sise": 3}}, "train.group_sise"),
        ({"model": {"path": "no-such-model"}}, "unknown model 'no-such-model'"),
        ({"scheduler": {"preset": "gyre", "options": {"phi": 1}}}, "phi"),
        ({"cells": {"count": 2}, "engine": {"kind": "sglang", "url": "http://127.0.0.1:1"}}, "cells.count must be 1"),
        ({"scheduler": {"preset": "async"}}, "train_cells"),
    ],
)
async def test_wrong_settings_end_in_one_line(
    tables: dict, message: str, write_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gyre_backend.service.__main__ import main

    arguments = ["--detached", "--config", str(write_config(**tables)), "--run-dir", str(tmp_path / "run")]
    code = await anyio.to_thread.run_sync(main, arguments)
    assert code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
