"""The longest token-identical path: what of a prompt the graph already holds. Looks, never changes."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sdk.graph.nodes import Int32, Node
from gyre_sdk.graph.tree import Place, TokenTree, common_prefix


@dataclass(frozen=True, slots=True)
class ResolvedPrefix:
    """The first `base_len` tokens of the prompt are the first `base_len` of (prompt + output) of call
    `base_call`.
    """

    base_call: int
    """-1 when nothing matches."""
    base_len: int
    node: str
    """Id of the node in which the match ends; empty when nothing matches."""
    whole: bool
    """The match covers all the tokens asked for."""
    sampled: int
    """How many of the matched tokens behind the given base were sampled."""


def resolve(tree: TokenTree, tokens: Int32, start: Place) -> tuple[Place, int]:
    """Walk from `start` along `tokens`; returns the farthest place and how many sampled tokens lie on the
    way.

    Among equally long ways the one with more sampled tokens wins, then the one through later calls: a retry
    supersedes.
    """
    best: tuple[tuple[int, int, int], Place] | None = None
    stack: list[tuple[Place, Int32, int, int]] = [(start, tokens, 0, -1)]
    while stack:
        place, rest, sampled, call = stack.pop()
        node = place.node
        if node is not None and not place.at_end:
            same = common_prefix(node.token_ids[place.within :], rest)
            place, rest = Place(node, place.within + same), rest[same:]
            if node.call >= 0:
                sampled, call = sampled + same, max(call, node.call)
        if len(rest) and place.at_end:
            following = _following(tree, place.node, int(rest[0]))
            if following:
                stack.extend((Place(child, 0), rest, sampled, call) for child in following)
                continue
        key = (place.length, sampled, call)
        if best is None or key > best[0]:
            best = (key, place)
    assert best is not None
    return best[1], best[0][1]


def _following(tree: TokenTree, node: Node | None, token: int) -> list[Node]:
    given = tree.given_after(node).get(token)
    found = [child for child in tree.sampled_after(node) if child.token_ids[0] == token]
    return found if given is None else [given, *found]
