"""Fits, recorded workloads and the files they are read from."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from gyre_backend.sim.trace import Row, groups_of, peak_concurrency, read_trace, tool_share, workload_of
from gyre_backend.sim.workload import LogNormal, Mixture, fit_lognormal, lognormal_from_tail
from gyre_sdk.errors import ConfigError
from gyre_sdk.wire.codec import encode, pack_ids
from gyre_sdk.wire.files import file_header
from gyre_sdk.wire.records import Intent, Opened, Outcome, Result, Sealed


def test_two_tail_points_give_the_published_2_4t_fit() -> None:
    """P(> 4 h) = .611 and P(> 8 h) = .233: median 4.86 h, mean of the cut distribution 5.05 h."""
    median, sigma = lognormal_from_tail(4 * 3600, 0.611, 8 * 3600, 0.233)
    assert median / 3600 == pytest.approx(4.86, abs=0.01)
    assert LogNormal(median, sigma).mean_s(8 * 3600) / 3600 == pytest.approx(5.05, abs=0.02)


def test_censored_fit_recovers_the_distribution_beyond_the_limit() -> None:
    rng = random.Random(0)
    draws = [600 * math.exp(0.9 * rng.gauss(0, 1)) for _ in range(4000)]
    fit = fit_lognormal([min(d, 900) for d in draws], [d > 900 for d in draws])
    assert fit.median_s == pytest.approx(600, rel=0.05)
    assert fit.sigma == pytest.approx(0.9, rel=0.06)


def test_task_share_correlates_a_group_and_keeps_the_whole_distribution() -> None:
    workload = LogNormal(600, 0.8, task_share=0.75)
    rng = random.Random(1)
    groups = [[math.log(s.virtual_s) for s in workload.group(rng, 8)] for _ in range(1500)]
    every = [x for g in groups for x in g]
    mean = sum(every) / len(every)
    total = sum((x - mean) ** 2 for x in every) / len(every)
    within = sum((x - sum(g) / 8) ** 2 for g in groups for x in g) / (7 * len(groups))
    assert total == pytest.approx(0.64, rel=0.08)
    assert within == pytest.approx(0.16, rel=0.08)


def test_a_mixture_draws_each_group_from_one_component() -> None:
    workload = Mixture(((1.0, LogNormal(10, 0.0)), (1.0, LogNormal(1000, 0.0))))
    kinds = {tuple(s.virtual_s for s in workload.group(random.Random(i), 3)) for i in range(40)}
    assert kinds == {(10.0,) * 3, (1000.0,) * 3}


def test_csv_and_json_lines_read_alike(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("start,end,outcome,tokens,group,engine_s\n0,10,completed,100,a,6\n5,25,timeout,,a,\n")
    lines = tmp_path / "t.jsonl"
    lines.write_text(
        json.dumps({"start": 0, "end": 10, "outcome": "completed", "tokens": 100, "group": "a", "engine_s": 6})
        + "\n\n"
        + json.dumps({"start": 5, "end": 25, "outcome": "timeout", "group": "a"})
    )
    rows = read_trace(table)
    assert rows == read_trace(lines)
    assert rows == [Row(0, 10, False, 100, "a", 6), Row(5, 25, True, 0, "a")]
    assert tool_share(rows) == pytest.approx(0.4)
    assert peak_concurrency(rows) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "start,end\n1,x\n", "t.csv:2: column 'end' is not a number: 'x'"),
        ("t.csv", "start,end\n5,5\n", "must be after start"),
        ("t.csv", "begin,end\n1,2\n", "start and end are required"),
        ("t.csv", "start,end\n", "no finished execution"),
        ("t.jsonl", "{", "t.jsonl:1: not JSON"),
        ("t.txt", "", "expected a run folder"),
    ],
)
def test_a_bad_trace_names_its_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_trace(path)


def test_a_recorded_run_is_read_from_its_wals(tmp_path: Path) -> None:
    for number, status in enumerate(("completed", "timeout", None)):
        folder = tmp_path / "executions" / f"e{number}"
        folder.mkdir(parents=True)
        records = [
            Opened(execution=f"e{number}", at=100.0, group="g"),
            Intent(call=0, at=101.0, dialect="chat", delta=pack_ids([1, 2, 3])),
            Result(call=0, at=104.0, ids=pack_ids([4, 5]), logprobs=b"", versions=(), finish="stop"),
        ]
        if status is not None:
            records.append(Sealed(at=110.0, outcome=Outcome(status=status)))
        frames = b"".join(encode(record, seq) for seq, record in enumerate(records))
        (folder / "wal.gyre").write_bytes(file_header() + frames)
    rows = read_trace(tmp_path)
    assert rows == [Row(100, 110, cut, 5, "g", 3.0) for cut in (False, True)]


def test_rows_without_groups_are_taken_in_order() -> None:
    rows = [Row(i, i + 1) for i in range(5)]
    assert [len(g) for g in groups_of(rows, 2)] == [2, 2, 1]


def test_a_timed_out_row_is_given_the_fitted_tail() -> None:
    rows = [Row(0, 60.0 + i) for i in range(30)] + [Row(0, 100, timed_out=True, tokens=10)] * 10
    (longest,) = {s for g in workload_of(rows, 8).groups for s in g if s.tokens}
    assert 100 < longest.virtual_s < 1000
    assert longest.tokens == pytest.approx(10 * longest.virtual_s / 100)
