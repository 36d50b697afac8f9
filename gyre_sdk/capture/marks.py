"""What the wire says about a call's place: headers and metadata of known harnesses, and the SDK's own scopes.

The names of the marks are those that `gyre_sdk.graph.edges` understands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

SCOPE_HEADER = "x-gyre-scope"
"""JSON of a session scope: {"id", "parent", "kind": "fork" | "compact" | "retry", "role", "after": a compact scope}."""

_HEADERS = {
    "x-stainless-retry-count": "retry_count",
    "x-claude-code-session-id": "session",
    "x-claude-code-agent-id": "agent",
    "session-id": "session",
    "session_id": "session",
    "thread-id": "agent",
    "x-codex-parent-thread-id": "parent_agent",
    "x-openai-subagent": "subagent",
    "x-codex-window-id": "window",
    "x-session-id": "agent",
    "x-parent-session-id": "parent_agent",
}
_CODEX = {"parent_thread_id": "parent_agent", "subagent_kind": "subagent", "request_kind": "request_kind"}
_LONGEST = 256


def marks_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Marks in headers, cut to a bounded length. What bodies tell is added by the dialects."""
    marks = {name: headers[header][:_LONGEST] for header, name in _HEADERS.items() if headers.get(header)}
    if "x-claude-code-agent-id" in headers:
        # Only subagents of Claude Code have an id of their own.
        marks["subagent"] = "claude-code"
    for key, value in _json(headers.get("x-codex-turn-metadata")).items():
        if key in _CODEX and value:
            marks[_CODEX[key]] = str(value)[:_LONGEST]
    for key, value in _json(headers.get(SCOPE_HEADER)).items():
        if key in ("id", "parent", "kind", "role", "after") and value:
            marks[f"scope_{key}"] = str(value)[:_LONGEST]
    return marks


def _json(text: str | None) -> dict[str, object]:
    if not text:
        return {}
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


@dataclass(slots=True)
class Scopes:
    """Session scopes of one execution: which call a new scope starts from.

    The first call of a `fork` scope is a subagent of the last call in its parent scope; of a `retry` scope, another try
    of it. Calls in a `compact` scope write a summary; the first call `after` it is the shortened context.
    """

    _last: dict[str, int] = field(default_factory=dict)
    _agents: dict[str, str] = field(default_factory=dict)
    _followed: set[str] = field(default_factory=set)

    def declare(self, marks: dict[str, str]) -> None:
        """Turn scope marks into what the graph understands, in place."""
        scope, kind = marks.get("scope_id", ""), marks.get("scope_kind", "")
        if scope and scope not in self._agents:
            self._begin(scope, kind, marks)
        after = marks.get("scope_after", "")
        if after and after not in self._followed and after in self._last:
            self._followed.add(after)
            marks["compact_of"] = str(self._last[after])
        if kind == "compact":
            marks.setdefault("request_kind", "compaction")
        if self._agents.get(scope):
            marks.setdefault("agent", self._agents[scope])
        if "scope_role" in marks:
            marks.setdefault("role", marks["scope_role"])

    def _begin(self, scope: str, kind: str, marks: dict[str, str]) -> None:
        parent = marks.get("scope_parent", "")
        self._agents[scope] = scope if kind == "fork" else self._agents.get(parent, "")
        source = self._last.get(parent)
        if source is None:
            return
        self._last[scope] = source
        if kind in ("fork", "retry"):
            marks[f"{kind}_of"] = str(source)

    def finished(self, marks: Mapping[str, str], call: int) -> None:
        """A call in a scope has its reply. Another try takes the place of what it retries, outside its scope too."""
        self._last[marks.get("scope_id", "")] = call
        if marks.get("scope_kind") == "retry":
            self._last[marks.get("scope_parent", "")] = call
