"""The metric files of a run that was killed at any moment: after a restart they say what the ledger says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_backend.service.metrics import Metrics


def row(version: int, **more: float) -> dict[str, float]:
    return {"step": version - 1, "policy_version": version, "loss": version / 8, **more}


@pytest.mark.parametrize("committed", [0, 1, 2, 3])
def test_a_kill_at_any_byte(committed: int, tmp_path: Path) -> None:
    """Three steps were written or being written; the ledger has `committed` of them."""
    whole = "".join(json.dumps(row(version, seconds=1.5)) + "\n" for version in (1, 2, 3)).encode()
    file = tmp_path / "metrics.jsonl"
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        metrics = Metrics(tmp_path)
        metrics.rewind([row(version) for version in range(1, committed + 1)])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["policy_version"] for line in lines] == list(range(1, committed + 1))
        assert metrics.last == (lines[-1] if lines else {})
        metrics.step(row(committed + 1))
        assert len(file.read_text().splitlines()) == committed + 1


def test_a_new_run_has_no_file(tmp_path: Path) -> None:
    Metrics(tmp_path).rewind([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["events.jsonl", "selection.jsonl"])
def test_a_torn_line_is_cut_before_the_next(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"event": "a"}\n{"even')
    metrics = Metrics(tmp_path)
    metrics.event("b")
    lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert lines[0]["event"] == "a"
