"""Short memories of texts, enough to see one reappear inside another."""

from __future__ import annotations

import re
from collections.abc import Iterable

NEEDLE_CHARS = 240
"""How much of a text is remembered."""
HAYSTACK_CHARS = 2**16
"""How much of each end of a long text is searched."""

_SPACE = re.compile(r"\s+")

SUMMARY_INSTRUCTIONS = (
    "create a detailed summary of the conversation",  # Claude Code, by hand and automatic
    "create a detailed summary of this conversation",
    "create a detailed summary of our conversation",
    "create a detailed summary of the recent portion",
    "context checkpoint compaction",  # Codex
    "create a handoff summary for another llm",
    "<state_snapshot>",  # Gemini CLI, Qwen Code
    "summarizes internal chat history into a given structure",
    "about to hand off your work to another ai agent",  # Terminus-2: summary,
    "picking up work from a previous ai agent",  # questions from a fresh context,
    "next agent has a few questions for you",  # and answers
    "context-aware state summary",  # OpenHands
    "provide a detailed prompt for continuing our conversation",  # opencode
)
"""How known harnesses ask for a summary of the conversation, in lower case."""


def asks_for_summary(text: str) -> bool:
    """Whether a known harness asks for a summary in this text. Plain searches: a regex costs 50 times as much
    here.
    """
    lowered = text.lower()
    return any(words in lowered for words in SUMMARY_INSTRUCTIONS)


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
