"""Anthropic Messages: `POST /v1/messages`, `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from gyre_sdk.capture.dialects.base import (
    JSON,
    Dialect,
    Ident,
    Incoming,
    Problem,
    StreamWriter,
    check_stop,
    decode,
    refuse,
    sse,
)
from gyre_sdk.capture.marks import marks_of
from gyre_sdk.capture.model import (
    Item,
    ModelRequest,
    ParsedReply,
    Part,
    Reply,
    SamplingRequest,
    Tool,
    ToolCall,
    json_object,
)
from gyre_sdk.errors import RequestError

STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "overloaded": "overloaded_error",
    "gone": "invalid_request_error",
}


class _OutputConfig(msgspec.Struct):
    format: Any = None


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    system: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    output_config: _OutputConfig | None = None


class _Block(msgspec.Struct):
    type: str = "text"
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block] | None = None


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


def _blocks(content: str | list[_Block] | None) -> list[_Block]:
    if content is None:
        return []
    return [_Block(text=content)] if isinstance(content, str) else content


def _joined(content: str | list[_Block] | None, where: str) -> str:
    """Text of blocks; several are separate paragraphs to the model."""
    blocks = _blocks(content)
    for block in blocks:
        if block.type != "text":
            raise RequestError(
                f"{where}: {block.type!r} blocks are not supported; only text is", code="unsupported_content"
            )
    return "\n".join(block.text for block in blocks)


def read_system(raw: bytes) -> list[Part]:
    """The system prompt: a string or text blocks."""
    text = _joined(decode(raw, str | list[_Block] | None, "system"), "system")  # type: ignore[arg-type]
    return [Part("system", text)] if text else []


def read_message(raw: bytes) -> list[Part]:
    """Parts of one message. Tool results become parts of their own, in order."""
    message = decode(raw, _Message, "messages")
    if message.role == "system":
        return [Part("system", _joined(message.content, "messages: a system message"))]
    if message.role == "assistant":
        return _read_assistant(_blocks(message.content))
    if message.role != "user":
        raise RequestError(f"messages: unknown role {message.role!r}")
    parts: list[Part] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            parts.append(Part("user", "\n".join(texts)))
            texts.clear()

    for block in _blocks(message.content):
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_result":
            flush()
            content = decode(block.content, str | list[_Block] | None, "tool_result")  # type: ignore[arg-type]
            parts.append(Part("result", _joined(content, "a tool_result"), call_id=block.tool_use_id))
        else:
            refuse("messages", f"{block.type!r} blocks in user messages are not supported; only text and tool_result")
    flush()
    return parts


def _read_assistant(blocks: list[_Block]) -> list[Part]:
    reasoning = "".join(block.thinking for block in blocks if block.type == "thinking")
    text = "".join(block.text for block in blocks if block.type == "text")
    parts = [Part("reasoning", reasoning)] if reasoning else []
    calls = [block for block in blocks if block.type == "tool_use"]
    if text or not (parts or calls):
        parts.append(Part("text", text))
    parts += [Part("call", bytes(call.input).decode(), name=call.name, call_id=call.id) for call in calls]
    return parts


def read_tools(raw: bytes) -> tuple[Tool, ...]:
    """Tools with a schema. Tools that run at the provider (web search and such) have none and are left out."""
    tools = decode(raw, list[_Tool] | None, "tools") or []  # type: ignore[arg-type]
    return tuple(
        Tool(tool.name, tool.description or "", tool.input_schema) for tool in tools if tool.input_schema is not None
    )


def arguments_object(call: ToolCall) -> JSON:
    """Arguments as the object this dialect wants, keys in sampled order."""
    value = json_object(call.arguments)
    return value if isinstance(value, dict) else {"input": value}


class MessagesDialect(Dialect):
    """Anthropic Messages."""

    name = "messages"

    def parse(self, incoming: Incoming) -> ModelRequest:
        body = decode(incoming.body, _Body)
        check_stop(body.stop_sequences)
        system = bytes(body.system)
        marks = marks_of(incoming.headers)
        if b"cc_is_subagent=true" in system:
            marks.setdefault("subagent", "claude-code")
        if body.output_config is not None and body.output_config.format is not None:
            marks["schema"] = "1"
        items = [Item(system, read_system)] if system != b"null" else []
        return ModelRequest(
            model=body.model,
            items=[*items, *(Item(bytes(raw), read_message) for raw in body.messages)],
            tools_raw=bytes(body.tools),
            read_tools=read_tools,
            sampling=SamplingRequest(
                temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, max_tokens=body.max_tokens
            ),
            stream=bool(body.stream),
            dialect=self.name,
            marks=marks,
        )

    def reply(self, request: ModelRequest, reply: Reply, ident: Ident) -> JSON:
        content: list[JSON] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature(reply.reasoning)})
        if reply.text or not reply.calls:
            content.append({"type": "text", "text": reply.text})
        for call in reply.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(call)})
        return {
            **_envelope(request, ident),
            "content": content,
            "stop_reason": STOP[reply.finish],
            "usage": usage(reply),
        }

    def stream(self, request: ModelRequest, ident: Ident) -> StreamWriter:
        return _MessagesStream(request, ident)

    def error(self, problem: Problem) -> JSON:
        message = problem.message
        if problem.overflow is not None:
            message = f"prompt is too long: {problem.overflow[0]} tokens > {problem.overflow[1]} maximum"
        return {"type": "error", "error": {"type": _ERRORS.get(problem.kind, "api_error"), "message": message}}

    def counts(self, incoming: Incoming) -> bool:
        return incoming.path.endswith("/count_tokens")

    def count(self, tokens: int) -> JSON:
        return {"input_tokens": tokens}

    def models(self, name: str) -> JSON:
        model = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return {"data": [model], "has_more": False, "first_id": name, "last_id": name}


def signature(reasoning: str) -> str:
    """Clients insist on one and send it back; it is not checked, since the text comes back too."""
    return hashlib.blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


def usage(reply: Reply) -> JSON:
    """Token counts; here `input_tokens` does not include cached ones."""
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.output_tokens,
    }


def _envelope(request: ModelRequest, ident: Ident) -> dict[str, Any]:
    return {
        "id": ident.named("msg_"),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _event(kind: str, **data: object) -> bytes:
    return sse({"type": kind, **data}, event=kind)


class _MessagesStream(StreamWriter):
    def __init__(self, request: ModelRequest, ident: Ident) -> None:
        super().__init__()
        self._request = request
        self._ident = ident
        self._index = -1
        self._open = ""

    def start(self) -> bytes:
        tokens = {
            "input_tokens": self._ident.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 1,
        }
        return _event("message_start", message={**_envelope(self._request, self._ident), "usage": tokens}) + self.idle()

    def idle(self) -> bytes:
        return _event("ping")

    def _close(self) -> bytes:
        if not self._open:
            return b""
        out = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": signature(self.deltas.reasoning)}
            out = _event("content_block_delta", index=self._index, delta=delta)
        self._open = ""
        return out + _event("content_block_stop", index=self._index)

    def _switch(self, kind: str, block: JSON) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._open = kind
        self._index += 1
        return out + _event("content_block_start", index=self._index, content_block=block)

    def _pieces(self, reasoning: str, text: str) -> bytes:
        out = b""
        if reasoning and self._open != "text":
            out += self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            delta = {"type": "thinking_delta", "thinking": reasoning}
            out += _event("content_block_delta", index=self._index, delta=delta)
        if text:
            out += self._switch("text", {"type": "text", "text": ""})
            out += _event("content_block_delta", index=self._index, delta={"type": "text_delta", "text": text})
        return out

    def partial(self, partial: ParsedReply) -> bytes:
        return self._pieces(*self.deltas.step(partial))

    def finish(self, reply: Reply) -> bytes:
        out = self._pieces(*self.deltas.rest(reply))
        if not reply.text and not reply.calls:
            out += self._switch("text", {"type": "text", "text": ""})
        for call in reply.calls:
            out += self._close()
            out += self._switch("call", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            text = call.arguments if isinstance(json_object(call.arguments), dict) else ""
            text = text or msgspec.json.encode(arguments_object(call)).decode()
            delta = {"type": "input_json_delta", "partial_json": text}
            out += _event("content_block_delta", index=self._index, delta=delta)
        out += self._close()
        stop = {"stop_reason": STOP[reply.finish], "stop_sequence": None}
        return out + _event("message_delta", delta=stop, usage=usage(reply)) + _event("message_stop")

    def error(self, problem: Problem) -> bytes:
        return sse(MessagesDialect().error(problem), event="error")
