"""The one message model behind all dialects: what a harness said, without the words of its provider.

A conversation is a sequence of *parts*. Parts, not messages, are what is compared between requests, because the same turn
is one message in one dialect and several items in another:

    system | user     one part per message (its text blocks joined)
    assistant         reasoning?, text?, tool call*    (in this order; consecutive assistant items form one turn)
    tool              one part per tool result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

PartKind = Literal["system", "user", "reasoning", "text", "call", "result"]
Ids = NDArray[np.int32]

ASSISTANT_KINDS = frozenset({"reasoning", "text", "call"})


class Part(msgspec.Struct, frozen=True):
    """A piece of a conversation.

    `text` is the body; for a call its arguments (JSON, or free text of a custom tool), for a result its output.
    """

    kind: PartKind
    text: str
    name: str = ""
    """Name of the tool, of a call (always) or a result (when the dialect says so)."""
    call_id: str = ""
    """Id that ties a result to its call; invented by us or by the harness, so never compared."""


class Tool(msgspec.Struct, frozen=True):
    """A tool the model may call, in OpenAI's function form."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    kind: Literal["function", "custom"] = "function"
    """`custom` tools take free text: the model sees one string parameter `input`."""
    namespace: str = ""
    """Responses: the namespace that a reply's function_call must name."""

    def as_openai(self) -> dict[str, Any]:
        """`{"type": "function", "function": {...}}`, the form chat templates take."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class SamplingRequest(msgspec.Struct, frozen=True):
    """What the harness asked for; the gateway's pinned values win."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One raw item of a request (message, content list, input item) and how to read it.

    Reading is lazy: an item that was seen before is known by the digest of its bytes and never parsed again.
    """

    raw: bytes
    read: Callable[[bytes], list[Part]]


@dataclass(slots=True)
class ModelRequest:
    """A request of a harness in our words. `items` in order of the conversation."""

    model: str
    items: Sequence[Item]
    tools_raw: bytes
    """Bytes of the tools, as sent; the key under which their parsed form is remembered."""
    read_tools: Callable[[bytes], tuple[Tool, ...]]
    sampling: SamplingRequest
    stream: bool
    dialect: str
    marks: dict[str, str] = field(default_factory=dict)
    """Facts about the call's place: headers of known harnesses, session scopes, request kinds."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What the dialect needs again when it writes the reply."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call the model made, with the text it really sampled."""

    id: str
    name: str
    arguments: str
    """JSON text exactly as sampled, or free text for a custom tool."""
    raw: str = ""
    """The whole block as sampled, markers included; empty when the family has no text form for it."""


class Reply(msgspec.Struct, frozen=True):
    """What the model said, read from its tokens."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def parts(self) -> list[Part]:
        """The reply as the next request will bring it back."""
        parts: list[Part] = []
        if self.reasoning:
            parts.append(Part("reasoning", self.reasoning))
        if self.text:
            parts.append(Part("text", self.text))
        parts.extend(Part("call", call.arguments, name=call.name, call_id=call.id) for call in self.calls)
        return parts


class ParsedReply(msgspec.Struct, frozen=True):
    """A (possibly unfinished) reply, as a renderer reads it from token ids."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0


class ChatRenderer(Protocol):
    """Turns conversations into token ids and ids back into replies, for one model family."""

    family: str
    vocab_size: int
    stop_ids: tuple[int, ...]

    def render(self, parts: Sequence[Part], tools: Sequence[Tool]) -> list[int]:
        """The whole conversation, ending where the assistant's next turn begins."""
        ...

    def bridge(self, prompt_tail: Ids, output: Ids, new: Sequence[Part], tools: Sequence[Tool]) -> list[int] | None:
        """Ids to append to (prompt + output) for `new`; None when the family can't extend exactly.

        prompt_tail: the last ids of the prompt (`TAIL` at least, or all of it).
        """
        ...

    def parse(self, ids: Ids, prompt_tail: Ids, tools: Sequence[Tool], *, final: bool = True) -> ParsedReply:
        """Read sampled ids. final=False: the reply still grows; what later tokens may change is held back."""
        ...

    def reply_ids(self, reply: Reply, tools: Sequence[Tool]) -> list[int]:
        """Ids that a model would sample to say `reply`, stop token included. For scripted engines."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...


TAIL = 1024
"""How many of a prompt's last ids a renderer gets to see when it extends a context or reads a reply."""


SYSTEMS_PROBE = (Part("system", "a"), Part("system", "b"), Part("user", "c"), Part("text", "d"), Part("system", "e"))
"""A conversation that templates with room for one system message only, at the start, refuse."""


def one_system(parts: Sequence[Part], *, start: bool = True) -> list[Part]:
    """For such templates: system parts at the start are joined, later ones (a harness's reminders) become a user's.

    start: the parts are a conversation from its beginning, not what follows in a known one.
    """
    leading = 0
    while start and leading < len(parts) and parts[leading].kind == "system":
        leading += 1
    joined = [Part("system", "\n\n".join(part.text for part in parts[:leading]))] if leading else []
    return joined + [Part("user", part.text) if part.kind == "system" else part for part in parts[leading:]]


def to_ids(ids: Sequence[int]) -> Ids:
    """int32 array of ids; a long list is converted piece by piece, so that other threads get their turn."""
    if len(ids) < 100_000:
        return np.asarray(ids, dtype=np.int32)
    array = np.empty(len(ids), np.int32)
    for at in range(0, len(ids), 50_000):
        array[at : at + 50_000] = ids[at : at + 50_000]
    return array


def join_messages(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts as OpenAI-style messages, the form that chat templates and `renderers` take."""
    messages: list[dict[str, Any]] = []
    open_turn: dict[str, Any] | None = None
    for part in parts:
        if part.kind not in ASSISTANT_KINDS:
            open_turn = None
            if part.kind == "result":
                message = {"role": "tool", "content": part.text, "tool_call_id": part.call_id}
                if part.name:
                    message["name"] = part.name
                messages.append(message)
            else:
                messages.append({"role": part.kind, "content": part.text})
            continue
        if open_turn is None or (part.kind == "reasoning" and "reasoning_content" in open_turn):
            open_turn = {"role": "assistant", "content": ""}
            messages.append(open_turn)
        if part.kind == "reasoning":
            open_turn["reasoning_content"] = part.text
        elif part.kind == "text":
            open_turn["content"] += part.text
        else:
            call = {"name": part.name, "arguments": json_object(part.text)}
            open_turn.setdefault("tool_calls", []).append({"id": part.call_id, "type": "function", "function": call})
    return messages


def json_object(text: str) -> dict[str, Any] | str:
    """Arguments as an object when they are one; templates iterate over it. Otherwise the text itself."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
    return value if isinstance(value, dict) else text


def text_of(content: object, where: str, allowed: Mapping[str, str] = {"text": "text"}) -> str:
    """Text of a string or of a list of text blocks. Images, audio and files are refused by name."""
    from gyre_sdk.errors import RequestError

    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected a string or a list of blocks, not {type(content).__name__}")
    texts: list[str] = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
            continue
        kind = block.get("type", "text") if isinstance(block, dict) else type(block).__name__
        if not isinstance(kind, str) or kind not in allowed:
            raise RequestError(f"{where}: {kind!r} blocks are not supported; only text is", code="unsupported_content")
        text = block.get(allowed[kind])
        if not isinstance(text, str):
            raise RequestError(f"{where}: a {kind!r} block needs a string {allowed[kind]!r}")
        texts.append(text)
    return "".join(texts)
