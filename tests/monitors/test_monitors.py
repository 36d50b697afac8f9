"""What goes to monitors, that none of them can hold up or end a run, and the page that Prometheus reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.config import parse_config
from gyre_backend.monitors import MONITORS, FanOut, RunFacts, flat_numbers, make_monitors
from gyre_backend.service.metrics import Metrics
from gyre_sdk.errors import ConfigError, MissingExtraError
from gyre_sdk.wire.prometheus import Family, families, to_text

ROW = {
    "step": 4,
    "at": 1764000000.5,
    "loss": 0.25,
    "ok": True,
    "name": "x",
    "cells": {"cell0": 2},
    "selection/paths": 3,
}


class Kept:
    """A monitor that keeps what it is told."""

    def __init__(self, facts: RunFacts | None = None) -> None:
        self.facts = facts
        self.steps: list[tuple[int, float, dict[str, float]]] = []
        self.closed = 0

    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        self.steps.append((number, at, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        raise OSError("no network")


def test_numbers_of_a_row_are_flat() -> None:
    assert flat_numbers(ROW) == {"loss": 0.25, "cells/cell0": 2.0, "selection/paths": 3.0}


def test_every_step_reaches_every_monitor_and_a_broken_one_is_left_out() -> None:
    good, broken = Kept(), Broken()
    monitors = FanOut({"broken": broken, "good": good})
    for step in range(3):
        monitors.step({**ROW, "step": step})
    monitors.close()
    monitors.close()
    assert [number for number, _, _ in good.steps] == [0, 1, 2]
    assert good.steps[0][1:] == (1764000000.5, flat_numbers(ROW))
    assert good.closed == 1
    assert broken.closed == 0
    assert monitors.failed == {"broken": "OSError: no network"}


def test_a_stuck_monitor_never_blocks_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_backend.monitors.fan_out.QUEUED", 2)
    go = threading.Event()

    class Stuck(Kept):
        def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
            assert go.wait(60)
            super().step(number, at, values)

    stuck = Stuck()
    monitors = FanOut({"stuck": stuck})
    for step in range(10):
        monitors.step({**ROW, "step": step})
    assert monitors.dropped >= 7
    monitors.close(timeout=0.05)  # gives up, with a line in the log
    assert stuck.closed == 0
    go.set()
    monitors.close()
    assert stuck.closed == 1
    assert len(stuck.steps) + monitors.dropped == 10


def test_steps_go_to_the_file_and_the_monitors(tmp_path: Path) -> None:
    kept = Kept()
    metrics = Metrics(tmp_path, FanOut({"kept": kept}))
    metrics.step(ROW)
    metrics.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [ROW]
    assert kept.steps == [(4, 1764000000.5, flat_numbers(ROW))]


def test_monitors_are_named_in_the_toml(tmp_path: Path) -> None:
    config = parse_config({"monitors": {"use": [f"{__name__}:Kept"], "options": {f"{__name__}:Kept": {"a": 1}}}})
    table = config.monitors
    monitors = make_monitors(table.use, tmp_path / "my-run", options=table.options, config={"train": {"steps": 1}})
    (kept,) = monitors._monitors.values()
    monitors.close()
    assert isinstance(kept, Kept)
    assert kept.facts == RunFacts(tmp_path / "my-run", "gyre", "my-run", {"train": {"steps": 1}}, {"a": 1})
    with pytest.raises(ConfigError, match=r"monitors\.used"):
        parse_config({"monitors": {"used": ["wandb"]}})


@pytest.mark.parametrize(
    ("use", "options", "words"),
    [
        (["wandbe"], {}, "unknown monitor 'wandbe'; there are tensorboard, wandb, trackio"),
        (["no_such_module:X"], {}, "can't be imported"),
        ([f"{__name__}:Nothing"], {}, "can't be imported"),
        ([], {"wandb": {"mode": "offline"}}, "'wandb' is not in monitors.use"),
    ],
)
def test_mistakes_are_told(use: list[str], options: dict[str, dict[str, str]], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make_monitors(use, tmp_path, options=options)


@pytest.mark.parametrize("name", MONITORS)
def test_a_missing_library_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingExtraError, match=rf"gyre\[{name}\]"):
        make_monitors([name], tmp_path)


def read_page(text: str) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """The families of a page, as Prometheus's own client reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        family.name: [(sample.name, sample.labels, sample.value) for sample in family.samples]
        for family in parser.text_string_to_metric_families(text)
    }


def test_the_page_of_the_service(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.step(ROW)
    metrics.event("cell lost", cell="cell1")
    metrics.count("weight_bytes", 2**40 + 1)
    text = metrics.prometheus({"policy_version": 5, "router_live": 0.5})
    assert text.splitlines()[:2] == ["# TYPE gyre_policy_version gauge", "gyre_policy_version 5"]
    page = read_page(text)
    assert page["gyre_router_live"] == [("gyre_router_live", {}, 0.5)]
    assert page["gyre_last_cells_cell0"][0][2] == 2
    assert page["gyre_cell_lost"] == [("gyre_cell_lost_total", {}, 1.0)]
    assert page["gyre_weight_bytes"][0][2] == 2**40 + 1


texts = st.text(max_size=20)


@given(st.dictionaries(texts, st.floats() | st.integers(-(2**53), 2**53), max_size=4), texts, texts)
def test_any_name_label_and_value_survives(values: dict[str, float], label: str, about: str) -> None:
    labelled = Family("zz", "counter", about, [({"reason": label}, 1.5)])
    text = to_text([labelled, *families("gauge", values)])
    page = read_page(text.encode("utf-8", "strict").decode())
    assert page["gyre_zz"] == [("gyre_zz_total", {"reason": label}, 1.5)]
    found = [sample for name, family in page.items() if name != "gyre_zz" for sample in family]
    assert len(found) <= len(values)
    sent = [float(value) for value in values.values()]
    assert all(any(got == value or (got != got and value != value) for value in sent) for _, _, got in found)
