"""`GET /metrics` of the gateway: the right numbers, for whoever has the metrics token, and for nobody else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gyre_sdk.capture.config import GatewayConfig
from gyre_sdk.wire.prometheus import CONTENT_TYPE
from gyre_sdk.wire.records import Outcome
from tests.gateway.conftest import make_rig

pytestmark = pytest.mark.anyio
TOKEN = "metrics-token-of-the-test"


async def read(http: httpx.AsyncClient) -> dict[str, float]:
    parser = pytest.importorskip("prometheus_client.parser")
    response = await http.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sample.labels.items()): sample.value
        for family in parser.text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_numbers_of_open_and_ended_executions(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ["a b", "c"], config=GatewayConfig(metrics_token=TOKEN)) as rig:
        assert (await read(rig.http))["gyre_gateway_calls_total"] == 0
        user = {"role": "user", "content": "hi"}
        reply = await rig.chat([user])
        edited = {**reply, "content": "something else"}
        await rig.chat([user, edited, user])
        page = await read(rig.http)
        calls = rig.graph.calls.values()
        assert page["gyre_gateway_executions_open"] == 1
        assert page["gyre_gateway_calls_total"] == page["gyre_gateway_finished_total"] == 2
        assert page["gyre_gateway_prompt_tokens_total"] == sum(call.prompt_tokens for call in calls)
        assert page["gyre_gateway_output_tokens_total"] == sum(len(call.output_ids) for call in calls)
        (reason,) = [call.rerender for call in calls if call.rerender]
        assert page[f"gyre_gateway_rerenders_total reason={reason}"] == 1
        await rig.gateway.seal(rig.handle.execution, Outcome(status="completed", reward=1.0, valid=True))
        after = await read(rig.http)
        assert after["gyre_gateway_executions_open"] == 0
        assert after["gyre_gateway_executions_sealed_total status=completed"] == 1
        assert after["gyre_gateway_calls_total"] == 2


async def test_the_page_is_for_the_metrics_token_alone(tmp_path: Path) -> None:
    async with make_rig(tmp_path, [], config=GatewayConfig(metrics_token=TOKEN)) as rig:
        assert (await rig.http.get("/metrics")).status_code == 401  # the execution's own key
        assert (await rig.http.get("/metrics", headers={"authorization": ""})).status_code == 401
    async with make_rig(tmp_path / "other", []) as rig:
        assert (await rig.http.get("/metrics", headers={"authorization": "Bearer x"})).status_code == 404
