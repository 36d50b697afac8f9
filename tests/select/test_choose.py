"""The choice of branches against a brute-force oracle on sets of tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.select.choose import Branch, choose

ROLES = ("main", "main-summary", "subagent", "subagent-summary")


@st.composite
def branch_lists(draw):
    """Random executions: each branch keeps a prefix of an earlier one's calls, then adds calls of its own."""
    branches: list[Branch] = []
    fresh_call = 0
    for number in range(draw(st.integers(1, 6))):
        extent: dict[int, int] = {}
        if branches and draw(st.booleans()):
            base = list(branches[draw(st.integers(0, len(branches) - 1))].extent.items())
            kept = base[: draw(st.integers(0, len(base)))]
            extent = dict(kept)
            if kept and draw(st.booleans()):
                extent[kept[-1][0]] = draw(st.integers(1, kept[-1][1]))
        for _ in range(draw(st.integers(0, 3))):
            extent[fresh_call] = draw(st.integers(1, 5))
            fresh_call += 1
        branches.append(Branch(str(number), draw(st.sampled_from([*ROLES, "auxiliary"])), extent))
    return branches


def tokens(branch: Branch) -> set[tuple[int, int]]:
    return {(call, index) for call, n in branch.extent.items() for index in range(n)}


@given(branch_lists(), st.one_of(st.none(), st.integers(1, 4)), st.integers(0, 99))
def test_choices_obey_the_rules(branches, j_max, seed) -> None:
    choices = choose(branches, roles=ROLES, j_max=j_max, seed=(seed,))
    taken: set[tuple[int, int]] = set()
    for choice in choices:
        branch = branches[choice.branch]
        open_roles = [r for r in ROLES if any(tokens(b) - taken for b in branches if b.role == r)]
        assert branch.role == open_roles[0], "the highest role with untaken tokens comes first"
        fresh = {(c, i) for c, (start, end) in choice.fresh.items() for i in range(start, end)}
        assert fresh == tokens(branch) - taken, "a path trains exactly what no earlier one took"
        assert fresh
        taken |= fresh
    everything = set().union(*(tokens(b) for b in branches if b.role in ROLES))
    assert len(choices) <= (j_max or len(branches))
    if j_max is None or len(choices) < j_max:
        assert taken == everything
    assert choices == choose(branches, roles=ROLES, j_max=j_max, seed=(seed,)), "the same seed gives the same choice"


def test_draws_are_proportional_to_untaken_tokens() -> None:
    branches = [Branch("a", "main", {0: 1}), Branch("b", "main", {1: 3}), Branch("c", "main", {2: 6})]
    first = Counter(choose(branches, roles=ROLES, j_max=1, seed=(s,))[0].branch for s in range(4000))
    assert [first[i] / 4000 for i in range(3)] == pytest.approx([0.1, 0.3, 0.6], abs=0.03)


def test_second_draw_counts_only_what_is_left() -> None:
    # b shares 90 of its 91 tokens with a: once a is taken, c's 9 tokens outweigh b's single one.
    branches = [Branch("a", "main", {0: 90, 1: 900}), Branch("b", "main", {0: 90, 2: 1}), Branch("c", "main", {3: 9})]
    second = Counter()
    for s in range(2000):
        choices = choose(branches, roles=ROLES, j_max=2, seed=(s,))
        if choices[0].branch == 0:
            second[choices[1].branch] += 1
    assert second[2] / sum(second.values()) == pytest.approx(0.9, abs=0.03)


def test_roles_not_named_are_never_taken() -> None:
    branches = [Branch("a", "auxiliary", {0: 5}), Branch("b", "main", {1: 1})]
    assert [c.branch for c in choose(branches, roles=ROLES, j_max=None, seed=(0,))] == [1]
    assert choose(branches[:1], roles=ROLES, j_max=None, seed=(0,)) == []
