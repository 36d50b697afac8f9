"""The comparison with real cells: measurements that the simulator itself made are reproduced, fit included."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.elastic_sim import compare, simulate

META = {"cells": 3, "steps": 5, "slots": 6, "groups_per_step": 4, "group_size": 4, "max_staleness": 1}
META |= {"wait_median_s": 0.2, "wait_sigma": 1.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "gyre": {},
    "step-switch": {"train_cells": 2, "switch_ratio": 0.8},
    "async": {"train_cells": 1},
    "colocate": {},
}


def measured(engine_s: float, train_s: float) -> dict[str, Any]:
    rows = []
    for name, options in OPTIONS.items():
        row = {"rival": name, "options": options, "move_to_training_s": 0.3, "move_to_rollout_s": 0.1}
        rows.append(row | {"step_s": simulate(META, row, engine_s, train_s, 8)})
    for row in rows:
        ratio = rows[0]["step_s"] / row["step_s"]
        row |= {"gyre_over": ratio, "gyre_over_low": ratio, "gyre_over_high": ratio}
    return {"meta": META, "rows": [*rows, {"rival": "router", "router_added_p50_ms": 1.0}]}


def test_what_the_simulator_measured_comes_out_again() -> None:
    rows = compare(measured(0.5, 0.5), seeds=8)
    assert [row["rival"] for row in rows] == list(OPTIONS)
    assert max(abs(row["difference"]) for row in rows) < 0.03
    assert {row["rival"] for row in rows if row["fitted"]} == {"colocate", "async"}


def test_measurements_without_the_fitted_rows_are_refused() -> None:
    document = measured(0.5, 0.5)
    document["rows"] = document["rows"][:1]
    with pytest.raises(SystemExit, match="no row for colocate, async"):
        compare(document, seeds=2)
