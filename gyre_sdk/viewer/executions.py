"""One execution, followed as its log grows: the second and third level of the page."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre_sdk.errors import ConfigError, CorruptRecordError, GraphError
from gyre_sdk.exporters.conversation import Conversations
from gyre_sdk.graph import BranchGraph, Node
from gyre_sdk.viewer import changes, dialect_forms
from gyre_sdk.viewer.outline import Outline, run_of
from gyre_sdk.viewer.texts import TokenTexts, ids_of
from gyre_sdk.viewer.training import Trained
from gyre_sdk.wire import WalReader

TOKENS = 1500
"""Tokens of one page of a box."""
TEXT = 200_000
"""Characters of one page of a request, reply or text."""
HITS = 500
SEARCH_CHARS = 64 * 2**20
"""Decoded text of one execution that is kept for searching."""
MAX_PIECE = 2_000
"""Characters of one token that are sent."""


class ExecutionView:
    """A graph with its bodies, kept up to date by `update`. Thread-safe."""

    def __init__(self, log: Path, texts: TokenTexts) -> None:
        self.problem = ""
        self._reader = WalReader(log)
        self._texts = texts
        self._graph = BranchGraph(keep_bodies=True)
        self._lock = threading.RLock()
        self._conversations: tuple[int, Conversations] | None = None
        self._searched: dict[str, str] = {}
        self._searched_chars = 0

    def update(self) -> None:
        """Take what was added to the log. Raises ConfigError when nothing of it can be read."""
        with self._lock:
            try:
                for frame in self._reader.frames():
                    self._graph.apply(frame.record())
                self.problem = ""
            except (CorruptRecordError, GraphError, OSError) as error:
                self.problem = str(error)
            if self._graph.opened is None:
                raise ConfigError(f"nothing can be read of this log: {self.problem or 'it holds no record yet'}")

    # -- the graph

    def page(self, opened: Sequence[str], trained: Trained, reveal: Sequence[str] = ()) -> dict[str, Any]:
        """Boxes, edges and facts."""
        with self._lock:
            self.update()
            graph = self._graph
            outline = Outline(graph, opened, trained, reveal)
            page = outline.page()
            summary = self._summary(graph, trained)
            for path in summary["trained"]["paths"]:
                path["box"] = outline.box_of(path["leaf"]).id if path["leaf"] in graph.nodes else ""
            return {**page, "summary": summary, "opened": list(opened)}

    def _summary(self, graph: BranchGraph, trained: Trained) -> dict[str, Any]:
        opened, outcome = graph.opened, graph.outcome
        assert opened is not None
        failed = [call for call in graph.calls.values() if call.state == "failed"]
        leaves = graph.leaves()
        return {
            "id": graph.execution,
            "task": opened.task,
            "group": opened.group,
            "harness": opened.harness,
            "dialects": sorted({call.dialect for call in graph.calls.values() if call.dialect}),
            "status": "" if outcome is None else outcome.status,
            "reward": None if outcome is None else outcome.reward,
            "valid": outcome is not None and outcome.valid,
            "message": "" if outcome is None else outcome.message[:500],
            "metrics": {} if outcome is None else outcome.metrics,
            "calls": len(graph.calls),
            "pending": sum(call.state == "pending" for call in graph.calls.values()),
            "failed": [[call.number, call.error[:200]] for call in failed[:20]],
            "nodes": len(graph.nodes),
            "branches": len(leaves),
            "unique": graph.unique_tokens,
            "flattened": sum(leaf.num_tokens for leaf in leaves),
            "problem": self.problem,
            "tokenizer": self._texts.problem,
            "trained": {
                "step": trained.step,
                "paths": [
                    {"leaf": p.leaf, "role": p.role, "weight": p.weight, "advantage": p.advantage,
                     "tokens": sum(end - start for _, start, end in p.calls)}
                    for p in trained.paths
                ],
            },
        }  # fmt: skip

    # -- one box

    def box(self, identity: str, trained: Trained, start: int = 0) -> dict[str, Any]:
        """Facts and the first tokens (from `start`) of a box. Raises ConfigError for an id that names none."""
        with self._lock:
            graph, nodes = self._graph, run_of(self._graph, identity)
            sibling = changes.sibling_of(graph, nodes)
            sampled = sorted({node.call for node in nodes if node.call >= 0})
            context = nodes[0].owner
            call = sampled[-1] if sampled else context
            spans = [span.version for number in sampled for span in graph.calls[number].versions]
            logprobs = np.concatenate([_logprobs(graph, node) for node in nodes])
            finite = logprobs[np.isfinite(logprobs)]
            weights = [p.weight for p in trained.paths for number, _, _ in p.calls if number in set(sampled)]
            return {
                "id": identity,
                "role": graph.role_of_call(context),
                "count": sum(map(len, nodes)),
                "sampled": int(sum(len(n) for n in nodes if n.call >= 0)),
                "nodes": len(nodes),
                "position": nodes[0].start,
                "calls": sampled[:200],
                "call": call,
                "dialect": graph.calls[call].dialect,
                "finish": graph.calls[call].finish or "",
                "engine": graph.calls[call].engine,
                "versions": [min(spans), max(spans)] if spans else [],
                "mean_logprob": float(finite.mean()) if len(finite) else None,
                "orphan": any(graph.orphan(number) for number in sampled),
                "weight": max(weights, default=0.0),
                "advantage": next((p.advantage for p in trained.paths if any(c in sampled for c, _, _ in p.calls)), None),
                "sibling": None if sibling is None else {
                    "kind": sibling.kind, "reason": sibling.reason[:300], "call": sibling.theirs, "inferred": sibling.inferred
                },
                **self._tokens(nodes, start),
            }  # fmt: skip

    def _tokens(self, nodes: Sequence[Node], start: int) -> dict[str, Any]:
        """Tokens [start, start + TOKENS) as [id, text, logprob or null, version or -1, call or -1]."""
        tokens: list[list[Any]] = []
        at = 0
        for node in nodes:
            low, high = max(start - at, 0), min(start + TOKENS - at, len(node))
            at += len(node)
            if low >= high:
                continue
            ids = [int(i) for i in node.token_ids[low:high]]
            logprobs, versions = _logprobs(self._graph, node)[low:high], _versions(self._graph, node, low, high)
            for i, text in enumerate(self._texts.pieces(ids)):
                value = float(logprobs[i])
                shown = round(value, 4) if np.isfinite(value) else None
                tokens.append([ids[i], text[:MAX_PIECE], shown, int(versions[i]), node.call])
        return {"start": start, "tokens": tokens, "next": start + TOKENS if start + TOKENS < at else None}

    def text(self, identity: str, what: str, start: int = 0) -> dict[str, Any]:
        """Characters [start, start + TEXT) of the `text`, `request`, `reply` or `record` of a box. Raises ConfigError."""
        with self._lock:
            nodes = run_of(self._graph, identity)
            sampled = [node.call for node in nodes if node.call >= 0]
            call = sampled[-1] if sampled else nodes[0].owner
            if what == "text":
                whole = self._texts.text(ids_of(nodes))
            elif what == "request":
                whole = dialect_forms.request_text(self._graph, self._said(), call)
            elif what == "reply":
                whole = dialect_forms.reply_text(self._graph, self._said(), call)
            elif what == "record":
                whole = dialect_forms.recorded_text(self._graph, call)
            else:
                raise ConfigError(f"a box has no {what[:40]!r}")
            end = start + TEXT
            return {
                "what": what, "call": call, "text": whole[start:end], "length": len(whole),
                "next": end if end < len(whole) else None,
            }  # fmt: skip

    def _said(self) -> Conversations:
        if self._conversations is None or self._conversations[0] != self._reader.offset:
            self._conversations = (self._reader.offset, Conversations(self._graph))
        return self._conversations[1]

    def diff(self, identity: str) -> dict[str, Any]:
        """What changed against the sibling. Raises ConfigError when there is none."""
        with self._lock:
            sibling = changes.sibling_of(self._graph, run_of(self._graph, identity))
            if sibling is None:
                raise ConfigError("this box has no sibling to compare with")
            return changes.compare(self._graph, self._texts, sibling)

    # -- searching

    def search(self, query: str, opened: Sequence[str]) -> dict[str, Any]:
        """Nodes whose text, id, call or role holds `query`, and the boxes that show or fold them."""
        wanted = query.strip().lower()
        with self._lock:
            hits = [node for node in self._graph.nodes.values() if wanted and self._matches(node, wanted)]
            hits.sort(key=lambda node: (node.owner, node.start))
            outline = Outline(self._graph, opened)
            boxes = dict.fromkeys(outline.box_of(node.id).id for node in hits)
            return {"hits": len(hits), "nodes": [node.id for node in hits[:HITS]], "boxes": list(boxes)[:HITS]}

    def _matches(self, node: Node, wanted: str) -> bool:
        names = f"{node.id} call {node.call if node.call >= 0 else node.owner} {self._graph.role_of_call(node.owner)} "
        return wanted in names or wanted in self._decoded(node)

    def _decoded(self, node: Node) -> str:
        if not self._texts.known:
            return ""
        key = f"{node.id}/{len(node)}"
        known = self._searched.get(key)
        if known is None:
            known = self._texts.text(ids_of([node])).lower()
            if self._searched_chars + len(known) <= SEARCH_CHARS:
                self._searched[key] = known
                self._searched_chars += len(known)
        return known


def _logprobs(graph: BranchGraph, node: Node) -> np.ndarray:
    """float32[n]: of each token of a node, NaN for given ones."""
    if node.call < 0:
        return np.full(len(node), np.nan, np.float32)
    return graph.calls[node.call].logprobs[node.offset : node.offset + len(node)]


def _versions(graph: BranchGraph, node: Node, low: int, high: int) -> np.ndarray:
    if node.call < 0:
        return np.full(high - low, -1, np.int32)
    return graph.calls[node.call].version_at(np.arange(node.offset + low, node.offset + high))


class Executions:
    """The views that were looked at last."""

    def __init__(self, texts: TokenTexts, keep: int = 6) -> None:
        self._texts = texts
        self._keep = keep
        self._views: OrderedDict[Path, ExecutionView] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, log: Path) -> ExecutionView:
        """The view of a log, made when it is new."""
        with self._lock:
            view = self._views.pop(log, None) or ExecutionView(log, self._texts)
            self._views[log] = view
            while len(self._views) > self._keep:
                self._views.popitem(last=False)
            return view
