"""`gyre sim` and `gyre forecast` as a user runs them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gyre_backend.sim import timeline
from gyre_backend.sim.cli import app, forecast_app
from gyre_backend.sim.scenario import load
from gyre_sdk.errors import ConfigError

SCENARIO = """
[cluster]
cells = 3
slots = 8
[batch]
groups_per_step = 4
group_size = 4
timeout_s = 3000
[workload]
kind = "lognormal"
median_s = 600
sigma = 0.8
[costs]
train_share = 0.2
reference_load = 8
load_scale = 6
[scheduler]
preset = "gyre"
[run]
steps = 10
warmup = 4
seeds = 2
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO)
    return path


def test_sim_prints_the_timeline_and_writes_svg_and_json(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, out = tmp_path / "t.svg", tmp_path / "t.json"
    app([str(scenario), "--preset", "gyre", "--preset", "colocate", "--svg", str(svg), "--json", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("core ") == 2
    assert "█" in printed
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    summaries = json.loads(out.read_text())
    assert summaries["gyre"]["max_staleness"] <= 1
    assert summaries["gyre"]["step_s"] < summaries["colocate"]["step_s"]


def test_the_timeline_covers_every_cell_second(scenario: Path) -> None:
    where, policy = load(scenario)
    result = where.simulate(policy)
    start, end = timeline.window(result, 2, 3)
    total = sum(last - first for _, _, first, last in timeline.spans(result, start, end))
    assert total == pytest.approx(3 * (end - start))
    assert len(timeline.text(result, start, end).splitlines()) == 5


def test_sweep_gives_a_row_per_point(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    app(["sweep", str(scenario), "--vary", "cluster.cells=2,4", "--vary", "costs.train_share=0.1", "--json", str(out)])
    rows = json.loads(out.read_text())
    assert [row["cluster.cells"] for row in rows] == [2, 4]
    assert rows[1]["scheduler"]["step_s"] < rows[0]["scheduler"]["step_s"]


def test_forecast_recommends_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    rows = [f"{i},{i + min(rng.lognormvariate(6, 0.9), 1500)}" for i in range(64)]
    trace = tmp_path / "trace.csv"
    trace.write_text("start,end\n" + "\n".join(rows) + "\n")
    out = tmp_path / "f.json"
    batch = ["--cells", "2", "--slots", "8", "--groups-per-step", "4", "--group-size", "4"]
    forecast_app([str(trace), *batch, "--seeds", "2", "--steps", "8", "--json", str(out)])
    printed = capsys.readouterr().out
    assert "Use `" in printed
    assert "training share 20%" in printed
    record = json.loads(out.read_text())
    assert set(record["modes"]) >= {"gyre", "colocate"}
    assert record["choice"] in record["modes"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("sigma = 0.8", "sigma = 0.8\nspread = 1"), "unknown field `spread`"),
        (("cells = 3", "cells = 0"), "cells must be a whole number >= 1"),
        (("[run]", "[runs]"), r"unknown table \[runs\]"),
        (('preset = "gyre"', 'preset = "best"'), "unknown scheduler preset 'best'"),
        (("train_share = 0.2", "train_share = 1.5"), "train_share must be in"),
    ],
)
def test_a_wrong_setting_is_named(scenario: Path, change: tuple[str, str], message: str) -> None:
    scenario.write_text(SCENARIO.replace(*change))
    with pytest.raises(ConfigError, match=message):
        load(scenario)
