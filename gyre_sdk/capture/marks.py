"""What the wire says about a call's place: headers and metadata of known harnesses, and the SDK's own scopes."""

from __future__ import annotations

import json
from collections.abc import Mapping

SCOPE_HEADER = "x-gyre-scope"
"""JSON of a session scope: {"kind": "fork" | "compact" | "retry", "id": ..., "parent": ...}."""

_KEPT = {
    "x-stainless-retry-count": "retry_count",
    "x-claude-code-session-id": "session",
    "x-claude-code-agent-id": "agent",
    "session-id": "session",
    "session_id": "session",
    "thread-id": "thread",
    "x-codex-parent-thread-id": "parent_thread",
    "x-openai-subagent": "subagent_kind",
    "x-codex-window-id": "window",
    "x-session-id": "session",
    "x-parent-session-id": "parent_session",
}
_LONGEST = 256


def marks_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Marks in headers, cut to a bounded length. Later knowledge (bodies) is added by the dialects."""
    marks = {name: headers[header][:_LONGEST] for header, name in _KEPT.items() if header in headers}
    scope = headers.get(SCOPE_HEADER)
    if scope:
        marks.update(_scope(scope))
    metadata = headers.get("x-codex-turn-metadata")
    if metadata:
        marks.update(_codex(metadata))
    return marks


def _scope(text: str) -> dict[str, str]:
    try:
        scope = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(scope, dict):
        return {}
    return {
        f"scope_{key}": str(value)[:_LONGEST] for key, value in scope.items() if key in ("kind", "id", "parent", "role")
    }


def _codex(text: str) -> dict[str, str]:
    try:
        metadata = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(metadata, dict):
        return {}
    names = {"parent_thread_id": "parent_thread", "subagent_kind": "subagent_kind", "request_kind": "request_kind"}
    return {name: str(metadata[key])[:_LONGEST] for key, name in names.items() if metadata.get(key)}
