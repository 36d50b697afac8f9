"""What of a request is kept in its intent, and how a restarted gateway knows it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gyre_sdk.capture.canonical import Canon, Digest
from gyre_sdk.capture.contexts import KIND_LETTER
from gyre_sdk.capture.model import Part, Tool
from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.graph.edges import CallFacts, ReplyFacts


class StoredRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Intent.request` as JSON: what was new in a request."""

    base: int = -1
    """Call that the message list begins with ..."""
    reply: bool = True
    """... with its reply, or without."""
    parts: list[Part | str] = []
    """New parts; a string `<kind letter>:<hex digest>` is a part that was stored before."""
    tools: list[Tool] | None = None
    """Tools, when they were not stored before."""
    tools_digest: str = ""
    model: str = ""
    stream: bool = False

    def digests(self, canon: Canon) -> list[tuple[str, Digest]]:
        """(kind letter, digest) of the new parts."""
        found: list[tuple[str, Digest]] = []
        for part in self.parts:
            if isinstance(part, str):
                kind, _, digest = part.partition(":")
                found.append((kind, bytes.fromhex(digest)))
            else:
                found.append((KIND_LETTER[part.kind], canon.part(part)))
        return found

    def known_parts(self) -> list[Part]:
        """The new parts whose text is here."""
        return [part for part in self.parts if not isinstance(part, str)]


class RequestStore:
    """Which parts and tools of an execution are in its log already."""

    def __init__(self) -> None:
        self._parts: set[Digest] = set()
        self._tools: set[Digest] = set()

    def pack(
        self, new: Sequence[Part], digests: Sequence[tuple[str, Digest]], tools: Sequence[Tool], tools_digest: Digest
    ) -> tuple[list[Part | str], list[Tool] | None]:
        """New parts and tools, those that were stored before as references."""
        parts: list[Part | str] = []
        for part, (kind, digest) in zip(new, digests):
            known = digest in self._parts
            parts.append(f"{kind}:{digest.hex()}" if known else part)
            if digest:
                self._parts.add(digest)
        fresh = tools_digest not in self._tools
        self._tools.add(tools_digest)
        return parts, list(tools) if fresh and tools else None

    def learn(self, stored: StoredRequest, digests: Sequence[tuple[str, Digest]]) -> None:
        """A request of an earlier process is in the log."""
        self._parts.update(digest for _, digest in digests if digest)
        self._tools.add(bytes.fromhex(stored.tools_digest))


def read_stored(data: bytes) -> StoredRequest:
    """Raises CorruptRecordError for an intent that another program wrote."""
    try:
        return msgspec.json.decode(data, type=StoredRequest)
    except msgspec.MsgspecError as error:
        raise CorruptRecordError(f"an intent's request can't be read: {error}") from error


def call_facts(
    number: int,
    at: float,
    marks: Mapping[str, str],
    new: Sequence[Part],
    *,
    extends: int,
    same_prompt: int,
    rerender_of: int,
) -> CallFacts:
    """What lineage wants to know of a call, from the parts that are new in it."""
    users = [part.text for part in new if part.kind == "user"]
    return CallFacts(
        call=number,
        at=at,
        marks=marks,
        extends=extends,
        same_prompt=same_prompt,
        rerender_of=rerender_of,
        system="\n".join(part.text for part in new if part.kind == "system")[:65536],
        first_user=users[0] if users else "",
        last_user=_last_user(new),
        new_users=users,
        new_results=[part.text for part in new if part.kind == "result"],
    )


def _last_user(new: Sequence[Part]) -> str:
    """The last message, if it is a user's; system messages may come behind it (Claude Code's reminders)."""
    said = [part for part in new if part.kind != "system"]
    return said[-1].text if said and said[-1].kind == "user" else ""


def reply_facts(text: str, arguments: Sequence[str]) -> ReplyFacts:
    """What lineage wants to know of a reply: its text and the strings in its tool calls' arguments."""
    strings: list[str] = []
    for argument in arguments:
        try:
            value = msgspec.json.decode(argument)
        except (msgspec.DecodeError, UnicodeDecodeError):
            value = argument
        _strings(value, strings, 4)
    return ReplyFacts(text=text, arguments=strings, tool_calls=len(arguments))


def _strings(value: object, found: list[str], depth: int) -> None:
    if isinstance(value, str):
        found.append(value)
    elif depth > 0 and isinstance(value, dict):
        for inner in value.values():
            _strings(inner, found, depth - 1)
    elif depth > 0 and isinstance(value, list):
        for inner in value:
            _strings(inner, found, depth - 1)
