"""OpenAI Responses: `POST /v1/responses`. Stateless: the whole input comes with each request."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gyre_sdk.capture.dialects.base import JSON, Dialect, Ident, Incoming, Problem, StreamWriter, decode, refuse
from gyre_sdk.capture.dialects.chat import ChatDialect
from gyre_sdk.capture.dialects.responses_stream import ResponsesStream, final_response, output_items
from gyre_sdk.capture.marks import marks_of
from gyre_sdk.capture.model import Item, ModelRequest, Part, Reply, SamplingRequest, Tool, text_of
from gyre_sdk.errors import RequestError

_SIGNATURE = b"gyre1:"
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PROVIDER_ITEMS = frozenset({"web_search_call", "image_generation_call", "file_search_call", "code_interpreter_call"})


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    input: str | list[msgspec.Raw]
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    include: list[str] | None = None
    text: _Text | None = None
    client_metadata: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: Any = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    input: str = ""
    output: Any = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[_Tool] | None = None


def read_instructions(raw: bytes) -> list[Part]:
    """The `instructions` string, as a system part."""
    return [Part("system", decode(raw, str, "instructions"))]


def read_text_input(raw: bytes) -> list[Part]:
    """A plain string as input: one user message."""
    return [Part("user", decode(raw, str, "input"))]


def read_item(raw: bytes) -> list[Part]:
    """Parts of one input item. Items of provider-side tools say nothing to our model and are left out."""
    item = decode(raw, _Item, "input")
    where = f"input: a {item.type!r} item"
    if item.type == "message":
        return _read_message(item, where)
    if item.type == "reasoning":
        reasoning = _reasoning(item)
        return [Part("reasoning", reasoning)] if reasoning else []
    if item.type == "function_call":
        return [Part("call", item.arguments, name=item.name, call_id=item.call_id)]
    if item.type == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.input}).decode()
        return [Part("call", arguments, name=item.name, call_id=item.call_id)]
    if item.type in ("function_call_output", "custom_tool_call_output"):
        output = item.output if isinstance(item.output, str | list) else msgspec.json.encode(item.output).decode()
        return [Part("result", text_of(output, where, _TEXTS), call_id=item.call_id)]
    if item.type in _PROVIDER_ITEMS:
        return []
    raise RequestError(f"input: {item.type!r} items are not supported", code="unsupported_item")


def _read_message(item: _Item, where: str) -> list[Part]:
    text = text_of(item.content, where, _TEXTS)
    if item.role in ("system", "developer"):
        return [Part("system", text)]
    if item.role == "user":
        return [Part("user", text)]
    if item.role == "assistant":
        return [Part("text", text)]
    raise RequestError(f"input: unknown role {item.role!r}")


def seal_reasoning(reasoning: str) -> str:
    """`encrypted_content` of our reasoning items: clients send it back as it is, so the reasoning survives the trip."""
    return base64.b64encode(_SIGNATURE + reasoning.encode("utf-8", "surrogatepass")).decode()


def _reasoning(item: _Item) -> str:
    if item.encrypted_content:
        try:
            data = base64.b64decode(item.encrypted_content, validate=True)
        except ValueError:
            data = b""
        if data.startswith(_SIGNATURE):
            return data.removeprefix(_SIGNATURE).decode("utf-8", "surrogatepass")
    if isinstance(item.content, list) and item.content:
        return "".join(str(block.get("text", "")) for block in item.content if isinstance(block, dict))
    return "".join(str(block.get("text", "")) for block in item.summary or [])


def read_tools(raw: bytes) -> tuple[Tool, ...]:
    """Function, custom and namespaced tools. Tools that run at the provider are left out."""
    tools: list[Tool] = []
    for tool in decode(raw, list[_Tool] | None, "tools") or []:  # type: ignore[arg-type]
        if tool.type == "namespace":
            tools.extend(_function(inner, tool.name) for inner in tool.tools or [] if inner.type == "function")
        elif tool.type == "function":
            tools.append(_function(tool))
        elif tool.type == "custom":
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            tools.append(Tool(tool.name, tool.description or "", parameters, kind="custom"))
    return tuple(tools)


def _function(tool: _Tool, namespace: str = "") -> Tool:
    return Tool(tool.name, tool.description or "", tool.parameters or {}, namespace=namespace)


class ResponsesDialect(Dialect):
    """OpenAI Responses."""

    name = "responses"

    def parse(self, incoming: Incoming) -> ModelRequest:
        body = decode(incoming.body, _Body)
        if body.previous_response_id or body.conversation:
            refuse("previous_response_id", "responses are not stored; send the whole input each time")
        if body.background:
            refuse("background", "not supported")
        items: list[Item] = []
        if body.instructions:
            items.append(Item(msgspec.json.encode(body.instructions), read_instructions))
        if isinstance(body.input, str):
            items.append(Item(msgspec.json.encode(body.input), read_text_input))
        else:
            items += [Item(bytes(raw), read_item) for raw in _settled(body.input)]
        marks = marks_of(incoming.headers)
        for metadata in (body.client_metadata, body.metadata):
            if metadata and isinstance(metadata.get("request_kind"), str):
                marks["request_kind"] = metadata["request_kind"][:64]
        if body.text is not None and (body.text.format or {}).get("type") == "json_schema":
            marks["schema"] = "1"
        tools = bytes(body.tools)
        return ModelRequest(
            model=body.model,
            items=items,
            tools_raw=tools,
            read_tools=read_tools,
            sampling=SamplingRequest(temperature=body.temperature, top_p=body.top_p, max_tokens=body.max_output_tokens),
            stream=bool(body.stream),
            dialect=self.name,
            marks=marks,
            extras={
                "tools": tools,
                "sealed": "reasoning.encrypted_content" in (body.include or ()),
                "instructions": body.instructions,
            },
        )

    def reply(self, request: ModelRequest, reply: Reply, ident: Ident) -> JSON:
        return final_response(
            request, ident, output_items(request, reply, ident, _kinds(request), _sealer(request)), reply
        )

    def stream(self, request: ModelRequest, ident: Ident) -> StreamWriter:
        return ResponsesStream(request, ident, _kinds(request), _sealer(request))

    def error(self, problem: Problem) -> JSON:
        return ChatDialect().error(problem)

    def models(self, name: str) -> JSON:
        # Codex asks with `client_version` and wants `models`.
        return {**super().models(name), "models": [{"slug": name, "display_name": name}]}


def _settled(raws: list[msgspec.Raw]) -> list[msgspec.Raw]:
    """The input without reasoning that leads nowhere.

    Codex keeps the finished items of a cut stream and asks again, so reasoning may stand at the end, or before other
    reasoning, without the message or call it led to. The model never said anything after it.
    """
    kept: list[msgspec.Raw] = []
    waiting: list[msgspec.Raw] = []
    for raw in raws:
        if b'"reasoning"' in bytes(raw)[:4096] and _type_of(raw) == "reasoning":
            waiting = [raw]
            continue
        if waiting and _type_of(raw) in ("message", "function_call", "custom_tool_call") and _by_assistant(raw):
            kept += waiting
        waiting = []
        kept.append(raw)
    return kept


class _Kind(msgspec.Struct):
    type: str = "message"
    role: str = ""


def _type_of(raw: msgspec.Raw) -> str:
    return decode(bytes(raw), _Kind, "input").type


def _by_assistant(raw: msgspec.Raw) -> bool:
    kind = decode(bytes(raw), _Kind, "input")
    return kind.type != "message" or kind.role == "assistant"


def _kinds(request: ModelRequest) -> dict[str, Tool]:
    return {tool.name: tool for tool in read_tools(request.extras["tools"])}


def _sealer(request: ModelRequest) -> Any:
    return seal_reasoning if request.extras["sealed"] else None
