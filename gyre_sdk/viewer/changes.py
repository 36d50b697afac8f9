"""What exactly changed between two branches: a diff of their texts from where they part, in bounded time."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_sdk.graph import BranchGraph, Node
from gyre_sdk.graph.nodes import Int32
from gyre_sdk.graph.views import first_own, typed_edges
from gyre_sdk.viewer.texts import TokenTexts

WORDS = 6_000
"""Words on either side up to which words are compared; lines beyond that."""
LINES = 3_000
ALIKE = 0.75
SHOWN = 20_000
"""Characters of one changed piece that are shown."""
AROUND = 240
"""Unchanged characters shown on either side of a change."""
_WORD = re.compile(r"\s+|\w+|[^\w\s]")
_COMPARED = ("retries", "rerenders", "compacts")


@dataclass(frozen=True, slots=True)
class Sibling:
    """What a node is compared with."""

    kind: str
    """`retries`, `rerenders`, `compacts`, or `sibling` for another branch at the same place."""
    reason: str
    mine: int
    """Call whose context and reply the node belongs to; the other's is `theirs`."""
    theirs: int
    inferred: bool = False


def sibling_of(graph: BranchGraph, nodes: Sequence[Node]) -> Sibling | None:
    """The branch to compare a box with: what it retries, re-renders or compacts, else its neighbour."""
    ids = {node.id for node in nodes}
    links = [edge.link for edge in typed_edges(graph) if edge.target.id in ids and edge.link.kind in _COMPARED]
    if links:
        link = min(links, key=lambda k: (_COMPARED.index(k.kind), k.target))
        return Sibling(link.kind, link.reason, link.target, link.source, link.inferred)
    parent = nodes[0].parent
    around = list(parent.children()) if parent is not None else list(graph.roots)
    others = [node for node in around if node is not nodes[0]]
    if not others or nodes[0].owner not in graph.calls:
        return None
    earlier = [node for node in others if node.owner < nodes[0].owner]
    other = max(earlier, key=lambda n: n.owner) if earlier else min(others, key=lambda n: n.owner)
    return Sibling("sibling", "another branch at the same place", nodes[0].owner, other.owner)


def compare(graph: BranchGraph, texts: TokenTexts, sibling: Sibling) -> dict[str, Any]:
    """The diff as parts [same | removed | added | skipped, text]. A retry compares replies, everything else whole contexts
    up to the reply of the newer one.
    """
    old, new = _sides(graph, sibling)
    head = _common(old, new)
    rest = min(len(old), len(new)) - head
    tail = _common(old[::-1][:rest], new[::-1][:rest])
    removed, added = old[head : len(old) - tail], new[head : len(new) - tail]
    before = texts.text(_ints(old[max(0, head - 60) : head]))
    after = texts.text(_ints(old[len(old) - tail :][:60])) if tail else ""
    parts = [["same", before[-AROUND:]], *_parts(texts, removed, added), ["same", after[:AROUND]]]
    return {
        "kind": sibling.kind,
        "reason": sibling.reason,
        "inferred": sibling.inferred,
        "mine": sibling.mine,
        "theirs": sibling.theirs,
        "same_before": head,
        "same_after": tail,
        "removed": len(removed),
        "added": len(added),
        "removed_ids": _ints(removed[:64]),
        "added_ids": _ints(added[:64]),
        "parts": [part for part in parts if part[1]],
    }


def _sides(graph: BranchGraph, sibling: Sibling) -> tuple[Int32, Int32]:
    old, new = graph.calls[sibling.theirs], graph.calls[sibling.mine]
    if sibling.kind == "retries":
        return old.output_ids, new.output_ids
    if sibling.kind == "sibling":
        return graph.path_tokens(old.number), graph.path_tokens(new.number)
    mine = graph.prompt_ids(new.number)
    own = first_own(new)
    if own is not None and own.start >= len(mine):  # it added nothing but its reply
        mine = graph.path_tokens(new.number)
    return graph.path_tokens(old.number), mine


def _common(a: Int32, b: Int32) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _parts(texts: TokenTexts, removed: Int32, added: Int32) -> list[list[str]]:
    old, new = texts.text(_ints(removed)), texts.text(_ints(added))
    if not old or not new:
        return [["removed", _cut(old)], ["added", _cut(new)]]
    found = _matcher(old, new)
    if found is None:
        return [["removed", _cut(old)], ["added", _cut(new)]]
    a, b, matcher = found
    parts: list[list[str]] = []
    for tag, i0, i1, j0, j1 in matcher.get_opcodes():
        if tag == "equal":
            parts.extend(_same("".join(a[i0:i1])))
            continue
        parts.append(["removed", _cut("".join(a[i0:i1]))])
        parts.append(["added", _cut("".join(b[j0:j1]))])
    return parts


def _matcher(old: str, new: str) -> tuple[list[str], list[str], difflib.SequenceMatcher[str]] | None:
    """By words where most of them are the same, else by lines: single words that two texts happen to share say nothing.
    None when there is too much of either.
    """
    a, b = _WORD.findall(old), _WORD.findall(new)
    if max(len(a), len(b)) <= WORDS:
        matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
        if matcher.ratio() >= ALIKE:
            return a, b, matcher
    a, b = old.splitlines(keepends=True), new.splitlines(keepends=True)
    if max(len(a), len(b)) > LINES:
        return None
    return a, b, difflib.SequenceMatcher(None, a, b, autojunk=False)


def _same(text: str) -> list[list[str]]:
    if len(text) <= 4 * AROUND:
        return [["same", text]]
    between = len(text) - 2 * AROUND
    return [["same", text[:AROUND]], ["skipped", f"{between:,} equal characters"], ["same", text[-AROUND:]]]


def _cut(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]}\n… {len(text) - SHOWN:,} characters …\n{text[-SHOWN // 2 :]}"


def _ints(ids: Int32) -> list[int]:
    return [int(i) for i in ids]
