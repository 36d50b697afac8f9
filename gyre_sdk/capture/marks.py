"""What the wire says about a call's place: headers and metadata of known harnesses, and the SDK's own scopes.

The names of the marks are those that `gyre_sdk.graph.edges` understands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

SCOPE_HEADER = "x-gyre-scope"
"""JSON of a session scope: {"id": ..., "parent": ..., "kind": "fork" | "compact" | "retry", "role": ...}."""

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
        if key in ("id", "parent", "kind", "role") and value:
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

    The first call of a `fork` scope is a subagent of the last call in its parent scope; of a `compact` scope, the
    shortened context of it; of a `retry` scope, another try of it.
    """

    _last: dict[str, int] = field(default_factory=dict)
    _agents: dict[str, str] = field(default_factory=dict)

    def declare(self, marks: dict[str, str]) -> None:
        """Turn scope marks into what the graph understands, in place."""
        scope = marks.get("scope_id")
        if scope is None:
            return
        kind, parent = marks.get("scope_kind", ""), marks.get("scope_parent", "")
        if scope not in self._agents:
            self._agents[scope] = scope if kind == "fork" else self._agents.get(parent, "")
            source = self._last.get(parent)
            name = {"fork": "fork_of", "compact": "compact_of", "retry": "retry_of"}.get(kind)
            if source is not None and name is not None:
                marks[name] = str(source)
        if self._agents[scope]:
            marks.setdefault("agent", self._agents[scope])
        if "scope_role" in marks:
            marks.setdefault("role", marks["scope_role"])

    def finished(self, marks: Mapping[str, str], call: int) -> None:
        """A call in a scope has its reply."""
        self._last[marks.get("scope_id", "")] = call
