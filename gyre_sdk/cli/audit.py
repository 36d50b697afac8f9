"""Does what was recorded agree with what others saw: the engine's own log, and the harness's own trajectory?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.harness.records import wal_paths
from gyre_sdk.wire import WalReader, unpack_floats, unpack_ids
from gyre_sdk.wire.records import Result


@dataclass(slots=True)
class Audit:
    """How many calls were compared, and what did not agree."""

    calls: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def expect(self, good: bool, problem: str) -> None:
        """Note a problem."""
        if not good:
            self.problems.append(problem)

    def __str__(self) -> str:
        compared = f"{self.calls} calls, {self.tokens} tokens"
        return f"{compared}: all agree" if not self.problems else f"{compared}: {len(self.problems)} DIFFER"


def results_of(log: Path) -> Iterator[Result]:
    """The replies of an execution, in order."""
    for frame in WalReader(log).frames():
        record = frame.record()
        if isinstance(record, Result):
            yield record


def against_engine(run_dir: Path, engine_log: Path) -> Audit:
    """Every recorded reply, token by token, against the engine's own log: prompt, ids and logprobs.

    Replies that were moved between engines in mid-stream stand in several lines there; they are compared piece by piece.
    """
    said: dict[str, list[dict[str, Any]]] = {}
    for line in engine_log.read_text().splitlines():
        entry = json.loads(line)
        said.setdefault(entry["rid"].rstrip(".").split(".c")[0] + ".c" + _call_of(entry["rid"]), []).append(entry)
    audit = Audit()
    for log in wal_paths(run_dir):
        graph = load_graph(log).graph
        for result in results_of(log):
            name = f"e{log.parent.name}.c{result.call:06d}"
            _compare(audit, name, result, graph, said.get(name, []))
    return audit


def _call_of(rid: str) -> str:
    """The six digits of a rid like `e0123456789ab.c000004.` or, for a resumed call, `e0123456789ab.c000004.1.`"""
    return rid.split(".c", 1)[1][:6]


def _compare(audit: Audit, name: str, result: Result, graph: BranchGraph, lines: list[dict[str, Any]]) -> None:
    ids, logprobs = unpack_ids(result.ids), unpack_floats(result.logprobs)
    audit.calls += 1
    audit.tokens += len(ids)
    audit.expect(bool(lines), f"{name}: the engine's log does not know this call")
    if not lines:
        return
    seen = np.asarray([token for line in lines for token in line["output_ids"]], np.int32)
    heard = np.asarray([value for line in lines for value in line["logprobs"]], np.float32)
    prompt = np.ascontiguousarray(graph.prompt_ids(result.call), np.int32)
    digest = hashlib.sha256(prompt.tobytes()).hexdigest()
    audit.expect(np.array_equal(ids, seen), f"{name}: {len(ids)} ids recorded, {len(seen)} sampled, not the same")
    audit.expect(np.array_equal(logprobs, heard), f"{name}: logprobs differ")
    audit.expect(lines[0]["prompt_sha256"] == digest, f"{name}: the engine saw another prompt")


def against_mini(run_dir: Path) -> Audit:
    """Every reply in mini-swe-agent's own trajectory against ours, call by call: text and token counts."""
    audit = Audit()
    for log in wal_paths(run_dir):
        path = log.parent / "harness" / "trajectory.json"
        if not path.is_file():
            continue
        theirs = _mini_replies(json.loads(path.read_text(errors="replace")))
        ours = list(results_of(log))
        name = log.parent.name
        # A harness that was killed at its deadline may have missed the last reply, never one before it.
        audit.expect(
            len(ours) - 1 <= len(theirs) <= len(ours), f"{name}: {len(theirs)} replies there, {len(ours)} here"
        )
        for result, (text, tokens) in zip(ours, theirs):
            audit.calls += 1
            audit.tokens += tokens
            own = json.loads(result.message)["text"]
            audit.expect(own == text, f"{name} call {result.call}: the text differs")
            audit.expect(len(result.ids) // 4 == tokens, f"{name} call {result.call}: {tokens} tokens there")
    return audit


def _mini_replies(trajectory: dict[str, Any]) -> list[tuple[str, int]]:
    """(text, completion tokens) of every reply in a mini-swe-agent trajectory, also of those it rejected."""
    found = []
    for message in trajectory.get("messages", []):
        response = message.get("extra", {}).get("response")
        if isinstance(response, dict):
            text = response["choices"][0]["message"]["content"] or ""
            found.append((text, int(response["usage"]["completion_tokens"])))
    return found
