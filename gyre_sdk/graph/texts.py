"""Short memories of texts, enough to see one reappear inside another."""

from __future__ import annotations

import re
from collections.abc import Iterable

NEEDLE_CHARS = 240
"""How much of a text is remembered."""
HAYSTACK_CHARS = 2**16
"""How much of each end of a long text is searched."""

_SPACE = re.compile(r"\s+")

SUMMARY_INSTRUCTIONS = re.compile(
    "|".join(
        (
            r"create a detailed summary of (the|this|our) conversation",  # Claude Code, by hand and automatic
            r"create a detailed summary of the RECENT portion",
            r"CONTEXT CHECKPOINT COMPACTION",  # Codex
            r"create a handoff summary for another LLM",
            r"<state_snapshot>",  # Gemini CLI, Qwen Code
            r"summarizes internal chat history into a given structure",
            r"about to hand off your work to another AI agent",  # Terminus-2: summary,
            r"picking up work from a previous AI agent",  # questions from a fresh context,
            r"next agent has a few questions for you",  # and answers
            r"context-aware state summary",  # OpenHands
            r"provide a detailed prompt for continuing our conversation",  # opencode
        )
    ),
    re.IGNORECASE,
)
"""How known harnesses ask for a summary of the conversation."""


def squeeze(text: str, limit: int | None = None) -> str:
    """Runs of white space as one blank, none at the ends; the first `limit` characters."""
    if limit is not None:
        text = text[: 4 * limit]
    squeezed = _SPACE.sub(" ", text).strip()
    return squeezed if limit is None else squeezed[:limit]


def needle(text: str) -> str:
    """What is remembered of a text."""
    return squeeze(text, NEEDLE_CHARS)


def haystack(texts: Iterable[str]) -> str:
    """What is searched of some texts."""
    parts = []
    for text in texts:
        if len(text) > 2 * HAYSTACK_CHARS:
            text = f"{text[:HAYSTACK_CHARS]} {text[-HAYSTACK_CHARS:]}"
        parts.append(squeeze(text))
    return "\n".join(parts)
