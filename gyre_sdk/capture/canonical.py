"""What counts as the same: digests of parts under a matcher policy.

| policy | text of replies | reasoning | tool arguments | system nonces |
|---|---|---|---|---|
| `strict` | exact | must be there, exact | exact text | kept |
| `default` | outer whitespace ignored | must be there, outer whitespace ignored | same JSON value | stripped |
| `role-and-content` | outer whitespace ignored | not compared | same JSON value | stripped |

Never compared, under any policy: call ids, `cache_control`, one text block against a plain string.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from gyre_sdk.capture.model import Part, Tool

MatcherPolicy = Literal["strict", "default", "role-and-content"]
Digest = bytes

NONCES: tuple[re.Pattern[str], ...] = (
    re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE),
    re.compile(r"\bcch=[0-9a-f]{5};?"),
)
"""What known harnesses write differently into each request's system prompt."""

SKIP: Digest = b""
"""Digest of a part that the policy does not compare."""


def digest(data: bytes) -> Digest:
    """16 bytes that stand for `data`."""
    return hashlib.blake2b(data, digest_size=16).digest()


def chain(before: Digest, part: Digest) -> Digest:
    """Digest of a conversation and one more part. A part that is not compared changes nothing."""
    return before if part is SKIP or part == SKIP else digest(before + part)


def without_nonces(text: str) -> str:
    """A system prompt without the lines that differ from request to request."""
    for nonce in NONCES:
        text = nonce.sub("", text)
    return text


def canonical_arguments(text: str) -> str:
    """Tool arguments with sorted keys and no spacing; text that is no JSON stays as it is."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text.strip()
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class Canon:
    """Digests under one policy."""

    def __init__(self, policy: MatcherPolicy) -> None:
        self.policy = policy

    def part(self, part: Part) -> Digest:
        """Digest of one part, or SKIP."""
        text, name = part.text, part.name
        if part.kind in ("text", "reasoning") and not text:
            return SKIP
        if self.policy == "role-and-content" and part.kind == "reasoning":
            return SKIP
        if self.policy != "strict":
            if part.kind == "call":
                text = canonical_arguments(text)
            elif part.kind in ("text", "reasoning"):
                text = text.strip()
                if not text:
                    return SKIP
            elif part.kind == "system":
                text = without_nonces(text)
        if part.kind == "result":
            name = ""
        return digest(f"{part.kind}\0{name}\0{text}".encode("utf-8", "surrogatepass"))

    def tools(self, tools: Sequence[Tool]) -> Digest:
        """Digest of the tools in their order; the order is part of what the model sees."""
        return digest(msgspec.json.encode(tools, order="deterministic"))


ROOT: Digest = digest(b"gyre")
