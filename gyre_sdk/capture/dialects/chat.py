"""OpenAI Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import replace
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
from gyre_sdk.capture.model import Item, ModelRequest, ParsedReply, Part, Reply, SamplingRequest, Tool, text_of
from gyre_sdk.errors import RequestError


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: str = "function"


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _ToolFunction
    type: str = "function"


def read_message(raw: bytes) -> list[Part]:
    """Parts of one message."""
    message = decode(raw, _Message, "messages")
    where = f"messages: a {message.role!r} message"
    if message.role in ("system", "developer"):
        return [Part("system", text_of(message.content, where))]
    if message.role == "user":
        return [Part("user", text_of(message.content, where))]
    if message.role == "tool":
        text = text_of(message.content, where)
        return [Part("result", text, name=message.name or "", call_id=message.tool_call_id or "")]
    if message.role != "assistant":
        raise RequestError(f"messages: unknown role {message.role!r}")
    parts: list[Part] = []
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        parts.append(Part("reasoning", reasoning))
    text = text_of(message.content, where, {"text": "text", "refusal": "refusal"})
    calls = message.tool_calls or []
    if text or not (calls or parts):
        parts.append(Part("text", text))
    for call in calls:
        arguments = call.function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        parts.append(Part("call", arguments, name=call.function.name, call_id=call.id))
    return parts


def read_tools(raw: bytes) -> tuple[Tool, ...]:
    """Function tools; other types are refused."""
    tools = decode(raw, list[_Tool] | None, "tools") or []  # type: ignore[arg-type]
    for tool in tools:
        if tool.type != "function":
            refuse("tools", f"type {tool.type!r} is not supported in this dialect; only 'function' is")
    return tuple(
        Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {}) for tool in tools
    )


class ChatDialect(Dialect):
    """OpenAI Chat Completions."""

    name = "chat"

    def parse(self, incoming: Incoming) -> ModelRequest:
        body = decode(incoming.body, _Body)
        if body.n not in (None, 1):
            refuse("n", "only one choice per request")
        if body.functions:
            refuse("functions", "use tools")
        check_stop(body.stop)
        options = body.stream_options
        marks = marks_of(incoming.headers)
        if (body.response_format or {}).get("type") == "json_schema":
            marks["schema"] = "1"
        return ModelRequest(
            model=body.model,
            items=[Item(bytes(raw), read_message) for raw in body.messages],
            tools_raw=bytes(body.tools),
            read_tools=read_tools,
            sampling=SamplingRequest(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                max_tokens=body.max_completion_tokens or body.max_tokens,
            ),
            stream=bool(body.stream),
            dialect=self.name,
            marks=marks,
            extras={"usage": bool(options and options.include_usage)},
        )

    def reply(self, request: ModelRequest, reply: Reply, ident: Ident) -> JSON:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        return {
            "id": ident.named("chatcmpl-"),
            "object": "chat.completion",
            "created": ident.created,
            "model": request.model,
            "choices": [choice],
            "usage": usage(reply),
        }

    def stream(self, request: ModelRequest, ident: Ident) -> StreamWriter:
        return _ChatStream(request, ident)

    def error(self, problem: Problem) -> JSON:
        kind = {"rate_limit": "rate_limit_error", "overloaded": "server_error", "server": "server_error"}.get(
            problem.kind, f"{problem.kind}_error"
        )
        message = problem.message
        if problem.overflow is not None:
            tokens, limit = problem.overflow
            message = (
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
                f"{tokens} tokens. Please reduce the length of the messages."
            )
        param = "messages" if problem.overflow is not None else None
        return {"error": {"message": message, "type": kind, "param": param, "code": problem.code}}


def usage(reply: Reply) -> JSON:
    """Token counts, as they are."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
    }


class _ChatStream(StreamWriter):
    def __init__(self, request: ModelRequest, ident: Ident) -> None:
        super().__init__()
        self._usage = bool(request.extras.get("usage"))
        self._head = {
            "id": ident.named("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": ident.created,
            "model": request.model,
        }

    def _chunk(self, delta: JSON, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return sse(chunk)

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def _pieces(self, reasoning: str, text: str) -> bytes:
        out = self._chunk({"reasoning_content": reasoning}) if reasoning else b""
        return out + (self._chunk({"content": text}) if text else b"")

    def partial(self, partial: ParsedReply) -> bytes:
        return self._pieces(*self.deltas.step(partial))

    def finish(self, reply: Reply) -> bytes:
        out = self._pieces(*self.deltas.rest(reply))
        for index, call in enumerate(reply.calls):
            head = {"index": index, "id": call.id, "type": "function"}
            out += self._chunk({"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]})
            out += self._chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        out += self._chunk({}, reply.finish)
        if self._usage:
            out += sse({**self._head, "choices": [], "usage": usage(reply)})
        return out + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        # No status comes with an event: the code carries it, as with other providers, for clients that ask again by it.
        told = replace(problem, code=str(problem.status)) if problem.status >= 500 else problem
        return sse(ChatDialect().error(told))
