"""The invariant checks themselves: a broken rule must be caught by the random worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gyre_backend.cells import policy_gates, policy_steps
from gyre_backend.cells.policy import preset
from tests.policy.world import World


def caught(seeds: int = 60, **options: Any) -> bool:
    """Some world of `seeds` fails an assertion."""
    for seed in range(seeds):
        config = preset("gyre", groups_per_step=3, group_size=2, **options)
        world = World(config=config, num_cells=3, slots=2, standalone=2, seed=seed, faults=0.02, drops=0.1)
        try:
            world.run(steps=4, budget=4000)
        except AssertionError:
            return True
    return False


def test_the_unbroken_policy_passes() -> None:
    assert not caught(seeds=20)


@pytest.mark.parametrize(
    ("module", "name", "broken", "options"),
    [
        (policy_gates, "level_allows", lambda *_: True, {}),
        (policy_gates, "level_allows", lambda *_: False, {}),
        (policy_gates, "enough_ready", lambda *_: False, {}),
        (policy_steps, "assignable", lambda state, config: state.ready[: config.groups_per_step], {}),
        (policy_steps, "dispatch", lambda state, *_: state, {}),
    ],
)
def test_a_broken_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert caught(**options)


def test_ignoring_deadlines_breaks_the_staleness_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(state: Any, config: Any) -> Any:
        return state.ready[: max(config.groups_per_step - len(state.members), 0)]

    monkeypatch.setattr(policy_steps, "assignable", greedy)
    assert caught(max_staleness=1)
