"""SGLang's contract as Gyre relies on it: one suite, for the embedded engine and for the real server."""

from __future__ import annotations

import time

import pytest

from tests.engines.served import LONG, Served

pytestmark = [pytest.mark.xdist_group("engine-contract")]


def test_health(server: Served) -> None:
    for path in ("/health", "/ready"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_model_info(server: Served) -> None:
    info = server.ok("/model_info")
    assert {"model_path", "weight_version", "is_generation"} <= set(info)
    assert info["weight_version"] == "1"
    assert server.http.get("/get_weight_version").status_code == 404


def test_reply_holds_ids_and_logprobs(server: Served) -> None:
    ids = server.prompt()
    reply = server.generate(ids, 6)
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 6 == meta["completion_tokens"]
    assert meta["prompt_tokens"] == len(ids)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_version"] == "1"
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]


def test_greedy_and_logprobs_equal_transformers(server: Served) -> None:
    import torch

    from gyre_backend.engines.embedded import load_model

    model = load_model(server.home)
    ids = server.prompt(30)
    for temperature in (0, 1.0, 1.7):
        reply = server.generate(ids, 12, params={"temperature": temperature, "top_k": 1 if not temperature else -1})
        out = reply["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + out])).logits[0, len(ids) - 1 : -1].float()
        if not temperature:
            assert logits.argmax(-1).tolist() == out
        expected = torch.log_softmax(logits / (temperature or 1.0), -1)[range(12), out]
        given = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        assert (given - expected).abs().max() < 2e-4, temperature


def test_logprobs_are_taken_before_top_p_and_top_k(server: Served) -> None:
    import torch

    from gyre_backend.engines.embedded import load_model

    model, ids = load_model(server.home), server.prompt(30)
    reply = server.generate(ids, 8, params={"temperature": 1.3, "top_p": 0.5, "top_k": 7})
    out = reply["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + out])).logits[0, len(ids) - 1 : -1].float() / 1.3
    expected = torch.log_softmax(logits, -1)[range(8), out]
    given = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (given - expected).abs().max() < 2e-4
    for row, token in zip(logits, out):
        assert token in row.topk(7).indices.tolist()


def test_stream_says_the_same(server: Served) -> None:
    ids = server.prompt()
    whole = server.generate(ids, 60)
    call = server.start(ids, 60)
    result = call.result()
    assert result["ids"] == whole["output_ids"]
    assert result["finish_reason"] == {"type": "length", "length": 60}
    assert len(call.events) >= 2


def test_a_stop_token_ends_the_reply_and_is_part_of_it(server: Served) -> None:
    ids = server.prompt()
    free = server.generate(ids, 8)["output_ids"]
    stop = free[3]
    reply = server.generate(ids, 8, params={"stop_token_ids": [stop], "ignore_eos": False})
    assert reply["output_ids"] == free[: free.index(stop) + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert server.generate(ids, 8, params={"stop_token_ids": [stop]})["output_ids"] == free  # ignore_eos wins


def test_a_client_that_leaves_ends_its_call(server: Served) -> None:
    with server.http.stream("POST", "/generate", json=server.body(server.prompt(), LONG, stream=True)) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        server.until(lambda: server.load()["num_running_reqs"] == 1, "the call counted")
    server.until(lambda: server.load()["num_running_reqs"] == 0, "the call gone")


def test_unknown_fields_are_ignored(server: Served) -> None:
    assert len(server.generate(server.prompt(), 2, no_such_field=1)["output_ids"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": None},
        {"input_ids": []},
        {"input_ids": [30] * 30000},
        {"sampling_params": {"max_new_tokens": -5}},
        {"sampling_params": {"max_new_tokens": 2, "temperature": -1.0}},
        {"sampling_params": {"max_new_tokens": 2, "top_p": 0}},
    ],
    ids=["no input", "empty", "too long", "negative count", "negative temperature", "top_p of 0"],
)
def test_what_cannot_be_served_is_a_400(server: Served, change: dict[str, object]) -> None:
    answer = server.post("/generate", {**server.body(server.prompt(), 2), **change})
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["message"]
    assert len(server.generate(server.prompt(), 1)["output_ids"]) == 1


def test_prompt_and_reply_must_fit_the_context(server: Served) -> None:
    answer = server.post("/generate", server.body(server.prompt(100), 4000))
    assert answer.status_code == 400
    assert "context length" in answer.json()["error"]["message"]


def test_a_rid_in_use_is_a_400(server: Served) -> None:
    first = server.start().wait_tokens()
    answer = server.post("/generate", server.body(server.prompt(), 2) | {"rid": first.rid})
    assert answer.status_code == 400
    assert "Duplicate" in answer.text
    assert not first.done
    server.post("/abort_request", {"rid": first.rid})
    assert first.result()["finish_reason"]["type"] == "abort"
    assert len(server.generate(server.prompt(), 2, rid=first.rid)["output_ids"]) == 2  # free again


def test_abort_keeps_partials_and_their_cache(server: Served) -> None:
    call = server.start(server.prompt(40)).wait_tokens(5)
    answer = server.post("/abort_request", {"rid": call.rid})
    assert (answer.status_code, answer.content) == (200, b"")
    result = call.result()
    assert result["finish_reason"]["type"] == "abort"
    assert result["finish_reason"]["status_code"] is None
    assert 5 <= len(result["ids"]) < LONG
    again = server.generate(call.prompt + result["ids"], 2)["meta_info"]
    assert again["cached_tokens"] >= again["prompt_tokens"] - 2


def test_abort_resend_goes_on_as_if_nothing_had_happened(server: Served) -> None:
    ids = server.prompt(20)
    whole = server.generate(ids, 40)
    call = server.start(ids).wait_tokens(5)
    server.post("/abort_request", {"rid": call.rid})
    part = call.result()
    kept = part["ids"][:20]
    rest = server.generate(ids + kept, 40 - len(kept))
    assert kept + rest["output_ids"] == whole["output_ids"]


def test_abort_of_a_waiting_call(server: Served) -> None:
    running = [server.start() for _ in range(4)]
    server.until(lambda: server.load()["num_running_reqs"] == 4, "four running")
    waiting = server.start()
    server.until(lambda: server.load()["num_waiting_reqs"] == 1, "one waiting")
    server.post("/abort_request", {"rid": waiting.rid})
    result = waiting.result()
    assert result["completion_tokens"] == 0
    assert result["finish_reason"]["message"] == "Abort in waiting queue"
    server.post("/abort_request", {"abort_all": True})
    assert all(call.result()["finish_reason"]["type"] == "abort" for call in running)


def test_abort_matches_by_prefix_of_a_live_rid(server: Served) -> None:
    base = server.rid()
    one = server.start(rid=base + "turn1")
    twelve = server.start(rid=base + "turn12")
    one.wait_tokens()
    twelve.wait_tokens()
    server.post("/abort_request", {"rid": base})  # no live rid: nothing happens
    one.wait_tokens(one.tokens + 5)
    twelve.wait_tokens(twelve.tokens + 5)
    server.post("/abort_request", {"rid": base + "turn1"})
    assert [call.result()["finish_reason"]["type"] for call in (one, twelve)] == ["abort", "abort"]


def test_prefix_cache_and_salt(server: Served) -> None:
    ids = server.prompt(24)
    server.generate(ids, 2)
    assert server.generate(ids, 2)["meta_info"]["cached_tokens"] >= 22
    assert server.generate(ids, 2, cache_salt="w8")["meta_info"]["cached_tokens"] == 0
    assert server.generate(ids, 2, cache_salt="w8")["meta_info"]["cached_tokens"] >= 22
    branch = ids[:16] + server.prompt(8)
    assert 14 <= server.generate(branch, 2)["meta_info"]["cached_tokens"] <= 17


def test_cached_and_computed_prefixes_give_the_same_logprobs(server: Served) -> None:
    ids = server.prompt(60)
    first = server.generate(ids, 10)
    again = server.generate(ids, 10)
    assert again["meta_info"]["cached_tokens"] > 50
    assert again["output_ids"] == first["output_ids"]
    pairs = zip(first["meta_info"]["output_token_logprobs"], again["meta_info"]["output_token_logprobs"])
    assert max(abs(a[0] - b[0]) for a, b in pairs) < 1e-4


def test_flush_cache(server: Served) -> None:
    ids = server.prompt(24)
    server.generate(ids, 2)
    assert server.post("/flush_cache").status_code == 200
    assert server.generate(ids, 2)["meta_info"]["cached_tokens"] == 0
    server.start().wait_tokens()
    assert server.post("/flush_cache").status_code == 400


def test_loads(server: Served) -> None:
    load = server.load()
    assert {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens"} <= set(load)
    assert load["num_running_reqs"] == 0
    server.start().wait_tokens()
    server.until(lambda: server.load()["num_running_reqs"] == 1, "the call counted")


def test_pause_in_place_freezes(server: Served) -> None:
    call = server.start(count=150).wait_tokens()
    assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    new = server.start(count=2)
    time.sleep(0.5)
    before = call.tokens
    time.sleep(0.5)
    assert call.tokens == before
    assert not new.done
    assert not new.tokens
    assert server.post("/flush_cache").status_code == 400
    assert server.http.get("/ready").status_code == 503
    assert server.post("/continue_generation").status_code == 200
    result = call.result()
    assert (result["completion_tokens"], result["num_retractions"]) == (150, 0)
    assert new.result()["completion_tokens"] == 2
    assert server.http.get("/ready").status_code == 200


def test_pause_retract_requeues(server: Served) -> None:
    call = server.start(count=150).wait_tokens()
    assert server.post("/pause_generation", {"mode": "retract"}).status_code == 200
    time.sleep(0.3)
    assert not call.done
    assert server.post("/flush_cache").status_code == 200
    server.post("/continue_generation")
    result = call.result()
    assert result["completion_tokens"] == 150
    assert result["num_retractions"] >= 1


def test_pause_aborts_by_default(server: Served) -> None:
    call = server.start().wait_tokens()
    assert server.post("/pause_generation", {}).status_code == 200
    result = call.result()
    assert result["finish_reason"]["type"] == "abort"
    assert 0 < result["completion_tokens"] < LONG
    assert server.http.get("/ready").status_code == 503


def test_a_call_over_two_versions_has_a_span_of_each(server: Served) -> None:
    call = server.start(count=150).wait_tokens()
    server.ok("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
    spans = call.result()["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "2"]
    assert (spans[0]["start"], spans[1]["end"]) == (0, 150)
    assert spans[0]["end"] == spans[1]["start"]


def test_a_new_version_aborts_unless_told_not_to(server: Served) -> None:
    call = server.start().wait_tokens()
    server.ok("/update_weight_version", {"new_version": "1"})
    assert call.result()["finish_reason"]["type"] == "abort"


def test_update_from_disk_and_back(server: Served) -> None:
    ids = server.prompt(24)
    checksum, out = server.checksum, server.generate(ids, 8)["output_ids"]
    assert server.ok("/update_weights_from_disk", {"model_path": server.other, "weight_version": "2"})["success"]
    changed = server.generate(ids, 8)
    assert server.version == changed["meta_info"]["weight_version"] == "2"
    assert changed["meta_info"]["cached_tokens"] == 0
    assert server.checksum != checksum
    assert changed["output_ids"] != out
    server.ok("/update_weights_from_disk", {"model_path": server.home, "weight_version": "1"})
    assert server.checksum == checksum
    assert server.generate(ids, 8)["output_ids"] == out


def test_update_without_a_flush_keeps_the_cache(server: Served) -> None:
    ids = server.prompt(24)
    server.generate(ids, 2)
    body = {"model_path": server.home, "weight_version": "1", "flush_cache": False}
    server.ok("/update_weights_from_disk", body)
    assert server.generate(ids, 2)["meta_info"]["cached_tokens"] >= 22


def test_update_waits_for_running_calls_but_not_when_paused(server: Served) -> None:
    body = {"model_path": server.home, "weight_version": "1", "flush_cache": False}
    call = server.start(count=150).wait_tokens()
    server.ok("/update_weights_from_disk", body)
    returned = time.monotonic()
    call.result()
    assert call.ended is not None
    assert call.ended < returned + 0.5
    call = server.start(count=150).wait_tokens()
    server.post("/pause_generation", {"mode": "in_place"})
    server.ok("/update_weights_from_disk", body)
    assert not call.done
    server.post("/continue_generation")
    assert call.result()["completion_tokens"] == 150


def test_a_bad_update_is_a_400_and_changes_nothing(server: Served) -> None:
    before = server.version, server.checksum
    answer = server.post("/update_weights_from_disk", {"model_path": "/no/such/model", "weight_version": "bad"})
    assert answer.status_code == 400
    assert not answer.json()["success"]
    assert (server.version, server.checksum) == before


def test_a_weight_update_has_a_bracket(server: Served) -> None:
    server.post("/pause_generation", {"mode": "abort"})
    assert server.post("/begin_weight_update", {}).status_code == 200
    assert server.post("/end_weight_update", {}).status_code == 200
    server.post("/continue_generation")
    assert len(server.generate(server.prompt(), 2)["output_ids"]) == 2
