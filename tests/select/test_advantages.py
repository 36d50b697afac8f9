"""Advantage estimators against their formulas; who counts in a baseline."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.errors import UnsupportedError
from gyre_backend.select.advantages import ExecutionResult, advantages, equal_rewards


def group(rewards, name="g"):
    return [ExecutionResult(f"{name}{i}", name, r, True) for i, r in enumerate(rewards)]


rewards_lists = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=8)


@given(rewards_lists)
def test_formulas(rewards) -> None:
    results, n = group(rewards), len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    centred = [r - mean for r in rewards]
    others = [r - (sum(rewards) - r) / (n - 1) if n > 1 else 0.0 for r in rewards]
    assert list(advantages(results, "dr_grpo").values()) == pytest.approx(centred, abs=1e-9)
    assert list(advantages(results, "rloo").values()) == pytest.approx(others, abs=1e-9)
    scaled = [c / (deviation + 1e-6) for c in centred]
    assert list(advantages(results, "grpo").values()) == pytest.approx(scaled, rel=1e-6, abs=1e-6)
    assert list(advantages(results, "reinforce++").values()) == pytest.approx(scaled, rel=1e-6, abs=1e-6)


@given(rewards_lists, rewards_lists)
def test_groups_do_not_mix_but_in_the_batch_scale(a, b) -> None:
    results = group(a, "a") + group(b, "b")
    for estimator in ("grpo", "dr_grpo", "rloo"):
        apart = advantages(group(a, "a"), estimator) | advantages(group(b, "b"), estimator)
        assert advantages(results, estimator) == apart
    centred = advantages(results, "dr_grpo")
    scale = statistics.pstdev(list(centred.values())) + 1e-6
    wanted = {e: v / scale for e, v in centred.items()}
    assert advantages(results, "reinforce++") == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_invalid_executions_are_out_and_placeholders_are_zero() -> None:
    results = [
        ExecutionResult("good", "g", 1.0, True),
        ExecutionResult("zero", "g", 0.0, True),
        ExecutionResult("invalid", "g", None, False),
        ExecutionResult("graded but invalid", "g", 5.0, False),
        ExecutionResult("nothing to grade", "g", None, False, placeholder=True),
    ]
    found = advantages(results, "dr_grpo")
    assert set(found) == {"good", "zero", "nothing to grade"}
    assert found["good"] == pytest.approx(2 / 3)
    assert found["nothing to grade"] == found["zero"] == pytest.approx(-1 / 3)


def test_equal_rewards() -> None:
    assert equal_rewards(group([1.0, 1.0]))
    assert not equal_rewards(group([1.0, 0.0]))
    assert equal_rewards([])
    assert equal_rewards([*group([1.0]), ExecutionResult("x", "g", 0.0, False)])


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(UnsupportedError, match="gae"):
        advantages(group([1.0]), "gae")
