"""Per-token credit: from the TOML's keys to the advantage of each edge."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tree_shapes import Shape, recorded_group
from gyre_backend.config import parse_config
from gyre_backend.select.credit import combined
from gyre_backend.select.selection import SelectionConfig
from gyre_backend.service.groups import credit_of, prepare
from gyre_backend.tree.plan import build_plan, plan_from_bytes
from gyre_sdk.errors import ConfigError
from tests.forests import make_path, random_paths

ROLES = ("main", "main-summary", "subagent", "subagent-summary")


@given(
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from(ROLES), st.floats(0, 4), max_size=4),
    st.floats(0.1, 1.0),
)
def test_each_token_gets_its_role_s_factor_and_one_per_later_call(
    seed: int, scale: dict[str, float], gamma: float
) -> None:
    paths, advantages = random_paths(seed, executions=2, branches=4)
    credit = combined(scale, gamma)
    for path in paths:
        found = None if credit is None else credit(path, advantages[path.execution])
        calls = sorted({int(call) for call in path.call if call >= 0})
        for t, call in enumerate(path.call):
            if call < 0:
                continue
            later = sum(other > call for other in calls)
            wanted = advantages[path.execution] * scale.get(path.role, 1.0) * gamma**later
            assert (advantages[path.execution] if found is None else found[t]) == pytest.approx(wanted)


def test_the_keys_of_the_file_reach_the_edges() -> None:
    config = parse_config({"algorithm": {"role_credit": {"subagent": 0.5}, "credit_discount": 0.25}})
    main = make_path("a", [1, 2, 3], [-1, 0, 1])
    helper = replace(make_path("a", [1, 7, 8], [-1, 2, 3], leaf="h"), role="subagent")
    plan = build_plan([main, helper], {"a": 2.0}, credit=credit_of(config))
    by_token = dict(zip(plan.edge_tgt.tolist(), plan.edge_adv.tolist(), strict=True))
    assert by_token == {2: 0.5, 3: 2.0, 7: 0.25, 8: 1.0}


def test_nothing_given_changes_nothing() -> None:
    assert credit_of(parse_config({})) is None
    assert combined({"main": 1.0}, 1.0) is None


@pytest.mark.parametrize("wrong", [{"role_credit": {"boss": 1.0}}, {"credit_discount": 0.0}, {"credit_discount": 1.5}])
def test_wrong_keys_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse_config({"algorithm": wrong})


def test_a_prepared_group_carries_the_credit() -> None:
    graphs = recorded_group(Shape(2, 3, 20, 4, 3, 5), seed=1, vocabulary=64)
    make = partial(
        prepare, "g", graphs, SelectionConfig(), weighting="execution", micro_tokens=4096, whole_replies=False
    )
    plain, halved = make(), make(credit=combined({"main": 0.5}, 1.0))
    assert plain is not None
    assert halved is not None
    for before, after in zip(plain.micros, halved.micros, strict=True):
        a, b = plan_from_bytes(before), plan_from_bytes(after)
        assert np.abs(a.edge_adv).sum() > 0
        np.testing.assert_allclose(b.edge_adv, a.edge_adv * 0.5, rtol=1e-6)
