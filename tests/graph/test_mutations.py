"""The property tests can fail: each mutation of the graph's inner workings is caught by one of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from gyre_sdk.graph import folding, resolve, tree, views
from gyre_sdk.graph.nodes import Call, Node
from gyre_sdk.graph.tree import TokenTree
from tests.graph import test_properties as properties
from tests.graph.programs import STEP_BYTES, program_of


def _no_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenTree, "own", lambda self, last, call: None)


def _tail_gets_the_id(patch: pytest.MonkeyPatch) -> None:
    split = TokenTree.split

    def mutated(self: TokenTree, node: Node, k: int) -> Node:
        tail = split(self, node, k)
        node.id, tail.id = tail.id, node.id
        self.nodes[node.id], self.nodes[tail.id] = node, tail
        return tail

    patch.setattr(TokenTree, "split", mutated)


def _offset_is_lost(patch: pytest.MonkeyPatch) -> None:
    split = TokenTree.split

    def mutated(self: TokenTree, node: Node, k: int) -> Node:
        tail = split(self, node, k)
        if tail.call >= 0:
            tail.offset -= 1
        return tail

    patch.setattr(TokenTree, "split", mutated)


def _sampled_merge(patch: pytest.MonkeyPatch) -> None:
    add = TokenTree.add_sampled

    def mutated(self: TokenTree, parent: Node | None, call: Call) -> Node:
        for node in self.sampled_after(parent):
            if node.token_ids.tolist() == call.output_ids.tolist():
                return node
        return add(self, parent, call)

    patch.setattr(TokenTree, "add_sampled", mutated)


def _prefix_one_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resolve, "common_prefix", lambda a, b: max(0, tree.common_prefix(a, b) - (len(a) > 2)))


def _prefix_one_long(patch: pytest.MonkeyPatch) -> None:
    def mutated(a: Any, b: Any) -> int:
        return min(len(a), len(b), tree.common_prefix(a, b) + 1)

    patch.setattr(resolve, "common_prefix", mutated)


def _given_wins(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Any, node: Node | None, token: int) -> list[Node]:
        given_node = self.given_after(node).get(token)
        return [given_node] if given_node is not None else []

    patch.setattr(resolve, "_following", mutated)


def _links_start_anywhere(patch: pytest.MonkeyPatch) -> None:
    def mutated(call: Call) -> Node | None:
        node = call.last
        while node is not None and node.parent is not None:
            node = node.parent
        return node

    patch.setattr(views, "first_own", mutated)


def _result_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(folding, "_check_output", lambda *arguments: None)


def _prompt_end_is_lost(patch: pytest.MonkeyPatch) -> None:
    place = TokenTree.place

    def mutated(self: TokenTree, last: Node | None, length: int) -> tree.Place:
        return place(self, last, max(0, length - (length > 3)))

    patch.setattr(TokenTree, "place", mutated)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _no_owner,
    _tail_gets_the_id,
    _offset_is_lost,
    _sampled_merge,
    _prefix_one_short,
    _prefix_one_long,
    _given_wins,
    _links_start_anywhere,
    _result_is_not_checked,
    _prompt_end_is_lost,
]

SUITE = [
    properties.test_every_context_is_what_the_engine_saw,
    properties.test_sampled_tokens_stand_where_they_were_sampled,
    properties.test_forest_and_acyclic,
    properties.test_every_link_is_an_edge_to_the_first_new_token,
    properties.test_replay_is_equal,
    properties.test_any_order_that_respects_time_gives_the_same_graph,
    properties.test_ids_are_stable_while_the_graph_grows,
    properties.test_resolve_is_the_longest_path_and_changes_nothing,
    properties.test_a_bad_record_changes_nothing,
]


def _caught() -> bool:
    """Whether a test of the suite fails for one of 40 random programs."""
    random = Random(7)
    for _ in range(40):
        program = program_of(random.randbytes(14 * STEP_BYTES))
        for test in SUITE:
            inner: Any = test
            more: dict[str, Any] = {"seed": random.getrandbits(32), "pick": random.randrange(50), "tail": [0, 1]}
            names = inner.hypothesis.inner_test.__annotations__
            try:
                inner.hypothesis.inner_test(program, **{key: more[key] for key in more if key in names})
            except (Exception, pytest.fail.Exception):  # boundary: any failure is what we look for
                return True
    return False


def test_the_suite_passes_unmutated() -> None:
    assert not _caught()


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_mutation_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert _caught()
