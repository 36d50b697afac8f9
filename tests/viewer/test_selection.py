"""What the backend says it trains, read back by the viewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.viewer_runs import every_edge, long_story
from gyre_backend.select.selection import SelectionConfig
from gyre_backend.service.groups import PreparedGroup, prepare
from gyre_backend.service.metrics import Metrics
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.viewer.executions import ExecutionView
from gyre_sdk.viewer.runs import RunData
from gyre_sdk.viewer.texts import TokenTexts


def _prepared(run: Path) -> PreparedGroup:
    first, second = every_edge("0000000000aa"), long_story("0000000000bb", 90, 2_000)
    first.seal(1.0)
    second.seal(0.0)
    graphs = [load_graph(story.write(run)).graph for story in (first, second)]
    made = prepare("g000000", graphs, SelectionConfig(), weighting="execution", micro_tokens=512, whole_replies=False)
    assert made is not None
    return made


def test_every_trained_token_is_in_the_selection_once_and_weighs_what_the_plan_says(tmp_path: Path) -> None:
    made = _prepared(tmp_path)
    Metrics(tmp_path).selection("g000000", [{"execution": "0000000000aa", "leaf": "c0"}])  # of an earlier attempt
    Metrics(tmp_path).selection("g000000", made.taken)
    run = RunData(tmp_path)
    run.update()
    tokens = 0
    for execution, advantage in (("0000000000aa", 1), ("0000000000bb", -1)):
        trained = run.trained(execution)
        spans = [(call, i) for path in trained.paths for call, start, end in path.calls for i in range(start, end)]
        assert len(spans) == len(set(spans)) > 0
        tokens += len(spans)
        assert sum(path.weight * (end - start) for path in trained.paths for _, start, end in path.calls) == (
            pytest.approx(1.0, rel=1e-4)
        )
        assert all(path.advantage * advantage > 0 for path in trained.paths)
    assert tokens == made.edges


def test_the_page_marks_exactly_the_boxes_that_are_trained(tmp_path: Path) -> None:
    made = _prepared(tmp_path)
    Metrics(tmp_path).selection("g000000", made.taken)
    run = RunData(tmp_path)
    run.update()
    log = run.log("0000000000aa")
    assert log is not None
    page = ExecutionView(log, TokenTexts(None)).page([], run.trained("0000000000aa"))
    assert sum(box["trained"] for box in page["nodes"]) == sum(p["tokens"] for p in page["summary"]["trained"]["paths"])
    assert not any(box["trained"] for box in page["nodes"] if box["orphan"] or box["role"] == "auxiliary")
    leaves = {box["id"] for box in page["nodes"]}
    assert {path["box"] for path in page["summary"]["trained"]["paths"]} <= leaves
