"""What was said: the messages of a call, put together from what the gateway recorded of each request and
reply.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gyre_sdk.capture.canonical import Canon
from gyre_sdk.capture.model import Part, Reply, Tool
from gyre_sdk.capture.stored import StoredRequest, read_stored
from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.graph import BranchGraph

LOST = "[text stored under another name]"


@dataclass(frozen=True, slots=True)
class Said:
    """A part of a conversation and the call whose reply it belongs to (-1: it came with a request)."""

    part: Part
    call: int = -1


class Conversations:
    """Reads the recorded requests and replies of one graph (made with `keep_bodies=True`). Logs without them
    give no messages.
    """

    def __init__(self, graph: BranchGraph) -> None:
        self._graph = graph
        self._canons = (Canon("strict"), Canon("default"), Canon("role-and-content"))
        self._known: dict[str, Part] = {}
        self._requests: dict[int, StoredRequest] = {}
        self._replies: dict[int, Reply] = {}
        self._tools: dict[str, list[Tool]] = {}
        for number in sorted(graph.calls):
            self._learn(number)

    def _learn(self, number: int) -> None:
        call = self._graph.calls[number]
        try:
            if call.request:
                request = self._requests[number] = read_stored(call.request)
                self._remember(request.known_parts())
                if request.tools is not None:
                    self._tools[request.tools_digest] = request.tools
            if call.message:
                reply = self._replies[number] = msgspec.json.decode(call.message, type=Reply)
                self._remember(reply.parts())
        except (CorruptRecordError, msgspec.MsgspecError):
            # Another program's log: its tokens are as good, only the texts are unknown to us.
            self._requests.pop(number, None)

    def _remember(self, parts: list[Part]) -> None:
        for part in parts:
            for canon in self._canons:
                self._known.setdefault(canon.part(part).hex(), part)

    def prompt(self, number: int) -> list[Said]:
        """The messages of a call's request."""
        chain: list[int] = []
        at = number
        while at >= 0 and at not in chain and at in self._requests:
            chain.append(at)
            at = self._requests[at].base
        said: list[Said] = []
        for position in range(len(chain) - 1, -1, -1):
            request = self._requests[chain[position]]
            if request.base >= 0 and request.reply:
                said.extend(self.reply(request.base))
            for part in request.parts:
                said.append(Said(self._part(part)))
        return said

    def reply(self, number: int) -> list[Said]:
        """The parts of a call's reply."""
        reply = self._replies.get(number)
        return [] if reply is None else [Said(part, number) for part in reply.parts()]

    def whole(self, number: int) -> list[Said]:
        """Request and reply."""
        return [*self.prompt(number), *self.reply(number)]

    def finish(self, number: int) -> str:
        """Why the reply ended, as the harness was told."""
        reply = self._replies.get(number)
        return "" if reply is None else reply.finish

    def tools(self, number: int) -> list[Tool]:
        """The tools the call offered."""
        request = self._requests.get(number)
        return [] if request is None else self._tools.get(request.tools_digest, [])

    def model(self, number: int) -> str:
        """The model name the harness asked for."""
        request = self._requests.get(number)
        return "" if request is None else request.model

    def _part(self, part: Part | str) -> Part:
        if isinstance(part, Part):
            return part
        kind, _, digest = part.partition(":")
        known = self._known.get(digest)
        if known is not None:
            return known
        names = {"s": "system", "u": "user", "r": "reasoning", "t": "text", "c": "call", "o": "result"}
        return Part(names.get(kind, "user"), LOST)  # type: ignore[arg-type]


def as_messages(said: list[Said]) -> list[dict[str, object]]:
    """Messages in OpenAI's chat form; consecutive assistant parts are one message."""
    messages: list[dict[str, object]] = []
    for item in said:
        part = item.part
        if part.kind in ("system", "user"):
            messages.append({"role": part.kind, "content": part.text})
            continue
        if part.kind == "result":
            messages.append({"role": "tool", "tool_call_id": part.call_id, "content": part.text})
            continue
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        if part.kind == "reasoning":
            last["reasoning_content"] = part.text
        elif part.kind == "text":
            last["content"] = part.text
        else:
            calls = last.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            function = {"name": part.name, "arguments": part.text}
            calls.append({"id": part.call_id, "type": "function", "function": function})
    return messages
