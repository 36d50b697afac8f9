"""EngineControl against whichever server is under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_backend.engines.sglang import EngineControl
from gyre_backend.errors import WeightsError
from gyre_sdk.errors import EngineError, EngineGoneError
from tests.engines.served import Served

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("engine-contract")]


async def test_update_goes_on_with_running_calls(server: Served) -> None:
    control = EngineControl(server.url)
    before = await control.checksum()
    call = server.start(count=150).wait_tokens()
    await control.update_from_disk(Path(server.other), 2)
    assert await control.version() == "2"
    other = await control.checksum()
    assert other != before
    assert [span["version"] for span in call.result()["weight_versions"]] == ["1", "2"]
    await control.update_from_disk(Path(server.home), 1, expect_checksum=before)
    with pytest.raises(WeightsError, match="holds weights"):
        await control.update_from_disk(Path(server.home), 1, expect_checksum=other)
    await control.resume()
    assert (await control.load())["num_running_reqs"] == 0
    await control.aclose()


async def test_a_refused_update_is_an_error(server: Served) -> None:
    control = EngineControl(server.url)
    with pytest.raises(EngineError, match="400"):
        await control.update_from_disk(Path("/no/such/model"), 2)
    await control.resume()
    assert await control.version() == "1"
    await control.aclose()


async def test_nobody_there() -> None:
    control = EngineControl("http://127.0.0.1:9")
    with pytest.raises(EngineGoneError):
        await control.pause()
    await control.aclose()
