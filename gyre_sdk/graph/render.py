"""The branch graph in the terminal: a tree of segments, and a table that says why each branch exists and what
it cost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gyre_sdk.graph.branch_graph import BranchGraph
from gyre_sdk.graph.nodes import CallLink, Leaf, Node
from gyre_sdk.graph.segments import Segment, segments
from gyre_sdk.graph.views import typed_edges

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

MAX_DEPTH = 24
"""Levels of indentation."""
STYLES = {
    "main": "bold green",
    "main-summary": "green",
    "subagent": "bold cyan",
    "subagent-summary": "cyan",
    "auxiliary": "dim",
}
_EDGE = {
    "retries": "retry of",
    "forks": "forked by",
    "returns": "returns from",
    "compacts": "compacted from",
    "rerenders": "re-render of",
}


def clean(text: str, limit: int = 120) -> str:
    """`text` on one line without control characters: what comes from a model or harness must not steer the
    terminal.
    """
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def render_graph(graph: BranchGraph, *, why: bool = False, problem: str = "") -> RenderableType:
    """Header, tree, and with `why` the table of branches. `problem`: what was wrong with the log."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [header(graph)]
    if problem:
        parts.append(Text(f"log: {clean(problem)}", style="yellow"))
    parts.append(tree(graph))
    if why:
        parts.append(Text())
        parts.append(branches(graph))
    return Group(*parts)


def header(graph: BranchGraph) -> Text:
    """Two lines of facts about the execution."""
    from rich.text import Text

    text = Text()
    text.append(f"execution {clean(graph.execution)}", style="bold")
    opened = graph.opened
    if opened is not None:
        for name in ("task", "harness", "model", "group"):
            if value := getattr(opened, name):
                text.append(f"  {name} {clean(value, 60)}")
    text.append("\n")
    text.append_text(_outcome(graph))
    states = [call.state for call in graph.calls.values()]
    counts = f"  {len(states)} calls"
    for state in ("failed", "pending"):
        if states.count(state):
            counts += f", {states.count(state)} {state}"
    leaves = graph.leaves()
    flattened = sum(leaf.num_tokens for leaf in leaves)
    unique = graph.unique_tokens
    sharing = f" ({flattened / unique:.2f}x shared)" if unique else ""
    counts += f"  {len(leaves)} branches  {unique:,} unique of {flattened:,} tokens{sharing}"
    text.append(counts)
    return text


def _outcome(graph: BranchGraph) -> Text:
    from rich.text import Text

    outcome = graph.outcome
    if outcome is None:
        return Text("not sealed", style="yellow")
    if not outcome.valid:
        blame = f", {outcome.failure}" if outcome.failure else ""
        text = Text(f"{outcome.status}, invalid{blame}", style="red")
    else:
        reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:g}"
        text = Text(f"{outcome.status}, {reward}", style="green" if outcome.reward else "white")
    if outcome.message:
        text.append(f" ({clean(outcome.message, 80)})", style="dim")
    return text


def tree(graph: BranchGraph) -> Tree:
    """Segments as a tree; every typed edge is named where it ends."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text("contexts", style="dim"), guide_style="dim")
    todo: list[tuple[Tree, Segment, int]] = [(root, segment, 0) for segment in reversed(segments(graph))]
    while todo:
        parent, segment, depth = todo.pop()
        line = segment_line(graph, segment)
        if depth > MAX_DEPTH:
            line = Text(f"(level {depth}) ", style="dim").append_text(line)
        branch = parent.add(line)
        # Deeper levels stay where they are: an indentation of hundreds of columns helps nobody.
        home = branch if depth < MAX_DEPTH else parent
        todo.extend((home, child, depth + 1) for child in reversed(segment.children))
    failed = [call for call in graph.calls.values() if call.state != "done"]
    for call in sorted(failed, key=lambda c: c.number)[:50]:
        root.add(Text(f"call {call.number} {call.state} {clean(call.error)}", style="red"))
    if len(failed) > 50:
        root.add(Text(f"and {len(failed) - 50} more without a reply", style="red"))
    return root


def segment_line(graph: BranchGraph, segment: Segment) -> Text:
    """One line: role, calls, tokens by provenance, versions, state, and the edges that lead here."""
    from rich.text import Text

    calls = segment.calls
    text = Text()
    leaf = segment.leaf_call >= 0
    text.append(segment.role if leaf else "shared", style=STYLES[segment.role] if leaf else "dim")
    if calls:
        text.append(f"  {_ranges(calls)}")
    text.append(f"  {segment.given:,} given", style="dim")
    if segment.sampled:
        text.append(f" + {segment.sampled:,} sampled")
        spans = [span.version for number in calls for span in graph.calls[number].versions]
        if spans:
            low, high = min(spans), max(spans)
            text.append(f"  v{low}" if low == high else f"  v{low}–{high}", style="dim")
    if leaf:
        call = graph.calls[segment.leaf_call]
        if call.finish and call.finish != "stop":
            text.append(f"  {call.finish}", style="yellow")
        if segment.orphan:
            text.append("  orphan", style="red")
    for link in segment.incoming:
        text.append(f"  ← {describe(link)}", style="magenta")
    return text


def describe(link: CallLink) -> str:
    """A typed edge in words."""
    reason = f": {clean(link.reason, 60)}" if link.reason else ""
    guessed = " (inferred)" if link.inferred else ""
    return f"{_EDGE[link.kind]} call {link.source}{reason}{guessed}"


def branches(graph: BranchGraph) -> Table:
    """Every branch with the reason for it and its cost: tokens of its whole path, and those that no earlier
    branch holds.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="why each branch exists", title_justify="left", title_style="bold")
    for name in ("ends with", "role", "because"):
        table.add_column(name, overflow="fold")
    for name in ("path", "own given", "own sampled", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in why_rows(graph):
        table.add_row(*row)
    return table


def why_rows(graph: BranchGraph) -> list[tuple[str, ...]]:
    """The table's cells, for `branches` and for tests."""
    reasons: dict[str, list[CallLink]] = {}
    for edge in typed_edges(graph):
        reasons.setdefault(edge.target.id, []).append(edge.link)
    rows: list[tuple[str, ...]] = []
    seen = set[str]()
    for leaf in graph.leaves():
        own = [node for node in leaf.nodes if node.id not in seen]
        seen.update(node.id for node in own)
        links = [link for node in own for link in reasons.get(node.id, [])]
        call = graph.calls[leaf.call]
        spent = "" if call.done_at is None else f"{max(0.0, call.done_at - call.at):.2f}"
        given = sum(len(node) for node in own if node.call < 0)
        sampled = sum(len(node) for node in own if node.call >= 0)
        name = f"call {leaf.call}" + (" (orphan)" if leaf.orphan else "")
        because = "; ".join(describe(link) for link in links) or _because(graph, leaf, own[0] if own else None)
        rows.append((name, leaf.role, because, f"{leaf.num_tokens:,}", f"{given:,}", f"{sampled:,}", spent))
    return rows


def _because(graph: BranchGraph, leaf: Leaf, first: Node | None) -> str:
    """Why a branch without a typed edge exists. `first`: the first node that no earlier branch holds."""
    label = graph.labels.get(leaf.call)
    if label is not None and label[1]:
        return clean(label[1])
    if first is None or first.parent is None:
        return "a context of its own"
    call = graph.calls[first.owner]
    base = graph.calls.get(call.base_call)
    if base is None:
        return f"shares its first {first.start:,} tokens with call {first.parent.owner}, then differs"
    kept, length = call.base_len - base.prompt_tokens, len(base.output_ids)
    if kept >= length:
        return f"goes on from call {base.number}, beside another branch that does"
    how = "without its reply" if kept <= 0 else f"after {kept} of the {length} tokens of its reply"
    ended = f" (which ended by {base.finish})" if base.finish not in ("stop", None) else ""
    return f"the harness went on from call {base.number} {how}{ended}"


def age(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def running_for(graph: BranchGraph) -> str:
    """How long an execution took, or has been running."""
    if graph.opened is None:
        return ""
    end = time.time() if graph.sealed is None else graph.sealed.at
    return age(max(0.0, end - graph.opened.at))


def _ranges(numbers: list[int]) -> str:
    """`calls 0-3, 7` for [0, 1, 2, 3, 7]."""
    pieces: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], -1]:
        if number == previous + 1:
            previous = number
            continue
        pieces.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    shown = ", ".join(pieces[:6]) + (" …" if len(pieces) > 6 else "")
    return f"{'call' if len(numbers) == 1 else 'calls'} {shown}"
