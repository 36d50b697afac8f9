"""Calls through the router: however engines come, go and die, the client sees one whole reply."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gyre_sdk.errors import EngineError
from gyre_sdk.sampling import Chunk
from gyre_sdk.wire.records import Span
from tests.router.conftest import world
from tests.router.scripted import Scripted, expected

pytestmark = pytest.mark.anyio
PROMPT = list(range(40, 60))


async def test_a_call_goes_through() -> None:
    async with world(Scripted("cell0")) as w:
        await w.add("cell0")
        done = await w.call(PROMPT, 12)
        w.check(done, PROMPT, 12)
        assert done.versions == (Span(1, 0, 12),)
        assert done.engine == "cell0"
        assert not w.router.relays
        assert not w.router.engines["cell0"].calls


async def test_a_call_that_does_not_stream_gets_one_reply() -> None:
    async with world(Scripted("cell0"), Scripted("cell1", cumulative=True)) as w:
        await w.add("cell0", "cell1")
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9}, "return_logprob": True, "extra_key": "k"}
        for _ in range(4):
            answer = await w.client._http.post(f"{w.client.base_url}/generate", json=body)
            assert answer.json()["output_ids"] == expected(PROMPT, 9)
        assert all(seen["extra_key"] == "k" for engine in w.engines.values() for seen in engine.seen)


@pytest.mark.parametrize("cumulative", [False, True])
async def test_drain_moves_running_calls_without_a_seam(cumulative: bool) -> None:
    one = Scripted("cell0", pace_s=0.005, cumulative=cumulative)
    two = Scripted("cell1", version="2", cumulative=cumulative)
    async with world(one, two) as w:
        await w.add("cell0")
        calls = [asyncio.create_task(w.call([*PROMPT, n], 60)) for n in range(4)]
        await w.until(lambda: w.running("cell0") == 4 and all(len(r.joined.ids) > 5 for r in w.router.relays.values()))
        await w.add("cell1")
        assert await w.router.drain("cell0") == 4
        assert w.running("cell0") == 0
        for n, call in enumerate(calls):
            done = await call
            w.check(done, [*PROMPT, n], 60)
            assert [span.version for span in done.versions] == [1, 2]
            assert done.engine == "cell1"
        assert w.router.counters()["moves"] == 4
        for seen in two.seen:  # prompt and partial were resent, and only the rest was asked for
            assert len(seen["input_ids"]) + seen["sampling_params"]["max_new_tokens"] == len(PROMPT) + 1 + 60


async def test_drain_of_the_only_engine_waits_for_the_next_one() -> None:
    async with world(Scripted("cell0", pace_s=0.005), Scripted("cell1")) as w:
        await w.add("cell0")
        call = asyncio.create_task(w.call(PROMPT, 60))
        await w.until(lambda: w.running("cell0") == 1)
        await w.router.drain("cell0")
        assert w.running("cell0") == 0
        late = asyncio.create_task(w.call(PROMPT, 5))
        await asyncio.sleep(0.05)
        assert not call.done()
        assert not late.done()
        await w.add("cell1")
        w.check(await call, PROMPT, 60)
        w.check(await late, PROMPT, 5)


async def test_a_place_is_reserved_before_the_call_is_taken_off() -> None:
    one, two = Scripted("cell0", pace_s=0.005), Scripted("cell1", pace_s=0.01, slots=1)
    async with world(one, two) as w:
        await w.add("cell1")
        busy = asyncio.create_task(w.call([1, 2, 3], 15))
        await w.until(lambda: w.running("cell1") == 1)
        await w.add("cell0")
        call = asyncio.create_task(w.call(PROMPT, 400))
        await w.until(lambda: w.running("cell0") == 1)
        drain = asyncio.create_task(w.router.drain("cell0"))
        await asyncio.sleep(0.03)
        assert w.running("cell0") == 1  # cell1 is full: it goes on here meanwhile
        assert not one.aborted
        await busy
        await drain
        assert one.aborted
        w.check(await call, PROMPT, 400)


async def test_an_engine_that_dies_in_mid_stream_is_no_seam() -> None:
    one, two = Scripted("cell0", pace_s=0.001), Scripted("cell1", pace_s=0.001, cumulative=True)
    one.die_at, two.die_at = [7, 11], [3, 5]
    async with world(one, two) as w:
        await w.add("cell0", "cell1")
        w.check(await w.call(PROMPT, 50), PROMPT, 50)
        assert w.router.counters()["failures"] >= 3


async def test_an_engine_that_is_lost_gives_its_calls_up() -> None:
    one = Scripted("cell0", pace_s=0.005)
    async with world(one, Scripted("cell1")) as w:
        await w.add("cell0")
        call = asyncio.create_task(w.call(PROMPT, 60))
        await w.until(lambda: w.running("cell0") == 1)
        w.router.lost("cell0")
        await w.add("cell1")
        w.check(await call, PROMPT, 60)
        await w.until(lambda: w.running("cell0") == 0)


async def test_a_deaf_engine_is_hung_up_on() -> None:
    one = Scripted("cell0", pace_s=0.005)
    one.deaf = True
    async with world(one, Scripted("cell1"), abort_s=0.1) as w:
        await w.add("cell0")
        call = asyncio.create_task(w.call(PROMPT, 500))
        await w.until(lambda: w.running("cell0") == 1)
        await w.add("cell1")
        await w.router.drain("cell0")
        w.check(await call, PROMPT, 500)


async def test_an_engine_that_refuses_everything_ends_in_an_error() -> None:
    one = Scripted("cell0")
    one.refuse = [500] * 50
    async with world(one, retries=2, probe_s=0.01) as w:
        await w.add("cell0")
        with pytest.raises(EngineError, match="no"):
            await w.call(PROMPT, 5)
        assert not w.router.relays
        assert not w.router.engines["cell0"].calls


async def test_a_bad_request_is_the_clients_fault() -> None:
    one = Scripted("cell0")
    one.refuse = [400]
    async with world(one) as w:
        await w.add("cell0")
        with pytest.raises(EngineError, match="400"):
            await w.call(PROMPT, 5)
        assert not w.router.engines["cell0"].suspect
        for body in (
            b"{",
            b"[]",
            b"{}",
            b'{"input_ids": "x"}',
            b'{"input_ids": [1], "sampling_params": {"max_new_tokens": "x"}}',
        ):
            answer = await w.client._http.post(f"{w.client.base_url}/generate", content=body)
            assert answer.status_code == 400


async def test_abort_by_the_client_returns_the_partial() -> None:
    async with world(Scripted("cell0", pace_s=0.005)) as w:
        await w.add("cell0")
        request = w.request(PROMPT, 500)
        call = asyncio.create_task(w.finish(request))
        await w.until(lambda: any(len(r.joined.ids) > 4 for r in w.router.relays.values()))
        await w.client.abort(request.rid)
        done = await call
        assert done.finish == "abort"
        assert done.output_ids.tolist() == expected(PROMPT, len(done.output_ids))


async def test_abort_of_a_waiting_call() -> None:
    async with world(Scripted("cell0")) as w:
        request = w.request(PROMPT, 5)
        call = asyncio.create_task(w.finish(request))
        await w.until(lambda: w.router.counters()["waiting"] == 1)
        await w.client.abort(request.rid)
        done = await call
        assert (done.finish, len(done.output_ids)) == ("abort", 0)


async def test_a_client_that_leaves_takes_its_call_along() -> None:
    async with world(Scripted("cell0", pace_s=0.005)) as w:
        await w.add("cell0")
        async for part in w.client.generate(w.request(PROMPT, 5000)):
            if isinstance(part, Chunk):
                break
        await w.client.aclose()
        await w.until(lambda: not w.router.relays and w.running("cell0") == 0)
        assert not w.router.engines["cell0"].calls


async def test_a_rid_in_use_is_a_400() -> None:
    async with world(Scripted("cell0", pace_s=0.005)) as w:
        await w.add("cell0")
        request = w.request(PROMPT, 100)
        call = asyncio.create_task(w.finish(request))
        await w.until(lambda: w.running("cell0") == 1)
        with pytest.raises(EngineError, match="Duplicate"):
            await w.finish(request)
        w.check(await call, PROMPT, 100)


async def test_back_pressure() -> None:
    async with world(Scripted("cell0", pace_s=0.02, slots=1), max_waiting=1, queue_s=0.1) as w:
        await w.add("cell0")
        running = asyncio.create_task(w.call(PROMPT, 50))
        await w.until(lambda: w.running("cell0") == 1)
        waiting = asyncio.create_task(w.call(PROMPT, 5))
        await w.until(lambda: w.router.counters()["waiting"] == 1)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}}
        answer = await w.client._http.post(f"{w.client.base_url}/generate", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        with pytest.raises(EngineError, match="place within") as caught:
            await waiting
        assert caught.value.status == 429
        w.check(await running, PROMPT, 50)


async def test_sessions_stay_and_new_ones_spread() -> None:
    async with world(Scripted("cell0", slots=4), Scripted("cell1", slots=4)) as w:
        await w.add("cell0", "cell1")
        first = [await w.call([n, *PROMPT], 2, session=f"s{n}") for n in range(6)]
        again = [await w.call([n, *PROMPT, 7], 2, session=f"s{n}") for n in range(6)]
        assert [done.engine for done in first] == [done.engine for done in again]
        w.engines["cell0"].pace_s = w.engines["cell1"].pace_s = 0.005
        together = [asyncio.create_task(w.call([90 + n, *PROMPT], 60, session=f"t{n}")) for n in range(6)]
        await w.until(lambda: w.running("cell0") + w.running("cell1") == 6)
        assert w.running("cell0") == w.running("cell1") == 3
        await asyncio.gather(*together)


async def test_moved_calls_go_where_they_can_stay_longest() -> None:
    engines = [Scripted(f"cell{n}", pace_s=0.1) for n in range(3)]  # ten seconds to be looked at in, then fast
    async with world(*engines) as w:
        await w.add("cell0")
        call = asyncio.create_task(w.call(PROMPT, 100))
        await w.until(lambda: w.running("cell0") == 1)
        await w.add("cell1", "cell2")
        w.router.expect({"cell1": 100.0, "cell2": 10.0})
        await w.router.drain("cell0")
        await w.until(lambda: w.running("cell1") == 1)
        w.engines["cell1"].pace_s = 0.001
        w.check(await call, PROMPT, 100)


async def test_what_it_says_about_itself() -> None:
    async with world(Scripted("cell0")) as w:
        http, url = w.client._http, w.client.base_url
        assert (await http.get(f"{url}/ready")).status_code == 503
        assert (await http.get(f"{url}/model_info")).status_code == 503
        await w.add("cell0")
        assert (await http.get(f"{url}/ready")).status_code == 200
        assert (await w.client.model_info()).model == "scripted"
        w.router.published(4)
        assert (await w.client.model_info()).weight_version == 4
        assert (await http.get(f"{url}/v1/loads")).json()["loads"][0]["weight_version"] == "4"
        await w.router.drain("cell0")
        assert (await w.client.model_info()).model == "scripted"
        with pytest.raises(httpx.HTTPStatusError):
            (await http.get(f"{url}/ready")).raise_for_status()
