"""Known contexts of one execution: which call's tokens a new request's messages extend.

Kept per message: 16-byte digests, never text. Everything here is a lookup; nothing is changed before `add`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre_sdk.capture.canonical import ROOT, SKIP, Canon, Digest, chain, digest
from gyre_sdk.capture.model import Part, Tool


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's messages as digests."""

    keys: Sequence[Digest]
    """`keys[i]` stands for the tools and the first i parts; `keys[0]` for the tools alone."""
    parts: Sequence[tuple[str, Digest]]
    """(kind, digest); the kind is one of s(ystem) u(ser) r(easoning) t(ext) c(all) o(utput of a tool)."""

    @property
    def end(self) -> Digest:
        """Stands for all of it."""
        return self.keys[-1]

    def said(self, at: int) -> bool:
        """Whether part `at` is the assistant's."""
        return 0 <= at < len(self.parts) and self.parts[at][0] in "rtc"


KIND_LETTER = {"system": "s", "user": "u", "reasoning": "r", "text": "t", "call": "c", "result": "o"}


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a conversation."""

    key: Digest
    """Stands for the tools and every part so far."""
    rest: Digest
    """Without tools and system messages: tells a changed system prompt from another conversation."""

    def then(self, kind: str, part: Digest) -> Point:
        """The place after one more part."""
        return Point(chain(self.key, part), self.rest if kind == "s" else chain(self.rest, part))


@dataclass(slots=True)
class KnownCall:
    """A finished or running call, as far as later requests need it."""

    number: int
    prompt: Point
    tools: Digest
    after: Point | None = None
    """Where the conversation stands after the reply; None until it is committed."""
    reply_kinds: str = ""
    reply_parts: tuple[Digest, ...] = ()
    call_ids: tuple[str, ...] = ()
    call_names: tuple[str, ...] = ()
    seen_tools: tuple[Tool, ...] = ()
    """Tools of its request, shared between calls."""
    truncated: bool = False
    delivered: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request stands among known contexts."""

    call: int = -1
    """Call whose prompt + output the request extends; -1 when there is none."""
    kept: int = 0
    """How many leading parts of the request that context holds."""
    same_prompt: int = -1
    """Latest call with exactly this prompt; its prompt ids can be reused as they are."""
    rerender: str = ""
    """Why the prompt does not extend the context that its messages came from."""
    rerender_of: int = -1


@dataclass(slots=True)
class Contexts:
    """The index. Grows by a few digests per message."""

    canon: Canon
    calls: dict[int, KnownCall] = field(default_factory=dict)
    _after_reply: dict[Digest, list[int]] = field(default_factory=dict)
    _prompts: dict[Digest, list[int]] = field(default_factory=dict)
    _rest: dict[Digest, int] = field(default_factory=dict)
    _by_call_id: dict[str, int] = field(default_factory=dict)

    def match(self, conversation: Conversation, call_ids: Sequence[str] = ()) -> Match:
        """Find the longest known context. `call_ids`: ids in the request, to tell replies of equal meaning apart."""
        keys = conversation.keys
        same = self._prompts.get(conversation.end)
        same_prompt = same[-1] if same else -1
        wanted = {self._by_call_id[id_] for id_ in call_ids[-64:] if id_ in self._by_call_id}
        last = True
        for kept in range(len(keys) - 1, 0, -1):
            if not conversation.said(kept - 1) or conversation.said(kept):
                continue
            found = self._after_reply.get(keys[kept])
            if found:
                call = self._choose(found, wanted)
                reason, of = ("", -1) if last else self._why(conversation, start=kept)
                return Match(call, kept, same_prompt, reason, of)
            last = False
        if same_prompt >= 0:
            return Match(same_prompt=same_prompt)
        reason, of = self._why(conversation, start=0)
        return Match(rerender=reason, rerender_of=of)

    def _choose(self, found: list[int], wanted: set[int]) -> int:
        """Among replies that read the same: the one whose ids came back, else the latest delivered, else the latest."""
        for call in reversed(found):
            if call in wanted:
                return call
        for call in reversed(found):
            if self.calls[call].delivered:
                return call
        return found[-1]

    def _why(self, conversation: Conversation, start: int) -> tuple[str, int]:
        """Reason and call of the first place, from part `start`, where the request leaves what was sampled."""
        keys, parts = conversation.keys, conversation.parts
        for at in range(start, len(parts)):
            if not conversation.said(at) or conversation.said(at - 1):
                continue
            calls = self._prompts.get(keys[at])
            if not calls:
                continue
            end = at
            while conversation.said(end):
                end += 1
            if keys[end] not in self._after_reply:
                return _difference(self.calls[calls[-1]], parts[at:end]), calls[-1]
        if start == 0 and any(kind in "rtc" for kind, _ in parts):
            return self._why_from_rest(conversation)
        return "", -1

    def _why_from_rest(self, conversation: Conversation) -> tuple[str, int]:
        """No prompt is known: another system prompt or other tools in front of a known conversation?"""
        rest = ROOT
        for kind, part in conversation.parts:
            if kind == "s":
                continue
            if kind in "rtc" and rest in self._rest:
                known = self.calls[self._rest[rest]]
                changed = self.root(known.tools).key != conversation.keys[0]
                return ("tools_changed" if changed else "system_changed"), known.number
            rest = chain(rest, part)
        return "", -1

    def add(self, number: int, point: Point, tools: Digest, parts: Sequence[tuple[str, Digest]]) -> KnownCall:
        """A call was accepted: its prompt is what stands at `point`, then `parts`."""
        for kind, part in parts:
            point = point.then(kind, part)
        known = KnownCall(number, point, tools)
        self.calls[number] = known
        self._prompts.setdefault(point.key, []).append(number)
        self._rest[point.rest] = number
        return known

    def root(self, tools: Digest) -> Point:
        """Where a conversation with these tools begins."""
        return Point(digest(ROOT + tools), ROOT)

    def add_reply(self, number: int, parts: Sequence[Part], *, truncated: bool) -> None:
        """The call's reply is committed; a request that brings it back extends this call."""
        known = self.calls[number]
        digests = [(KIND_LETTER[part.kind], self.canon.part(part)) for part in parts]
        digests = [(kind, part) for kind, part in digests if part != SKIP]
        known.reply_kinds = "".join(kind for kind, _ in digests)
        known.reply_parts = tuple(part for _, part in digests)
        called = [part for part in parts if part.kind == "call"]
        known.call_ids = tuple(part.call_id for part in called)
        known.call_names = tuple(part.name for part in called)
        known.truncated = truncated
        point = known.prompt
        for kind, part in digests:
            point = point.then(kind, part)
        known.after = point
        self._after_reply.setdefault(point.key, []).append(number)
        for id_ in known.call_ids:
            self._by_call_id[id_] = number

    def call_of(self, call_id: str) -> KnownCall | None:
        """The call whose reply made this tool call."""
        number = self._by_call_id.get(call_id)
        return None if number is None else self.calls.get(number)

    def forget(self, number: int) -> None:
        """The call failed: nothing can extend it."""
        known = self.calls.pop(number, None)
        if known is None:
            return
        numbers = self._prompts.get(known.prompt.key, [])
        if number in numbers:
            numbers.remove(number)
        if not numbers:
            self._prompts.pop(known.prompt.key, None)
        if self._rest.get(known.prompt.rest) == number:
            del self._rest[known.prompt.rest]

    def same_prompt(self, key: Digest) -> list[int]:
        """Calls with this prompt, oldest first."""
        return self._prompts.get(key, [])


def _difference(known: KnownCall, turn: Sequence[tuple[str, Digest]]) -> str:
    """How a turn in a request differs from the reply that was given there."""
    reply = list(zip(known.reply_kinds, known.reply_parts))
    sent = [pair for pair in turn if pair[1] != SKIP]
    if [pair for pair in reply if pair[0] != "r"] == [pair for pair in sent if pair[0] != "r"]:
        return "reasoning_dropped"
    same_texts = [pair for pair in reply if pair[0] == "t"] == [pair for pair in sent if pair[0] == "t"]
    calls = sum(kind == "c" for kind, _ in turn)
    if same_texts and known.reply_kinds.count("c") == calls > 0:
        return "tool_args_rewritten"
    return "message_edited"
