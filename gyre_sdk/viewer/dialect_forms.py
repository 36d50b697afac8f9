"""A call's request and reply in the dialect the harness spoke, put together again from what the log holds.

The log keeps a request's parts once, in no provider's words; bytes that mean nothing to the model (key order, cache hints,
images of headers) are not kept, so this is what was said in the form it was said in, not the very bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gyre_sdk.capture.dialects.base import Dialect, Ident
from gyre_sdk.capture.dialects.chat import ChatDialect
from gyre_sdk.capture.dialects.gemini import GeminiDialect, sign
from gyre_sdk.capture.dialects.messages import MessagesDialect, signature
from gyre_sdk.capture.dialects.responses import ResponsesDialect, seal_reasoning
from gyre_sdk.capture.model import ModelRequest, Part, Reply, SamplingRequest, Tool, json_object
from gyre_sdk.exporters.conversation import Conversations, Said, as_messages
from gyre_sdk.graph import BranchGraph, Call

JSON = dict[str, Any]


def request_text(graph: BranchGraph, conversations: Conversations, number: int) -> str:
    """The request of a call as indented JSON; empty when the log holds no request."""
    call = graph.calls[number]
    if not call.request:
        return ""
    said = conversations.prompt(number)
    if not said:
        return ""
    build = _REQUESTS.get(call.dialect, chat_request)
    body = build([item.part for item in said], conversations.tools(number))
    model = conversations.model(number)
    return _indented({**({"model": model} if model else {}), **body})


def reply_text(graph: BranchGraph, conversations: Conversations, number: int) -> str:
    """The reply of a call as indented JSON, as a client that does not stream gets it; a failure as it was recorded."""
    call = graph.calls[number]
    if call.error:
        return _indented({"error": call.error})
    if not call.message:
        return ""
    try:
        reply = msgspec.json.decode(call.message, type=Reply)
    except msgspec.MsgspecError:
        return call.message.decode("utf-8", "replace")
    dialect = _DIALECTS.get(call.dialect, ChatDialect)()
    ident = Ident(graph.execution, number, int(call.at), call.prompt_tokens)
    return _indented(dialect.reply(_asked(call, conversations), reply, ident))


def recorded_text(graph: BranchGraph, number: int) -> str:
    """What the log itself holds of a call: what was new in its request, sampling, marks, times; as indented JSON."""
    call = graph.calls[number]
    facts: JSON = {
        "call": number,
        "dialect": call.dialect,
        "state": call.state,
        "base_call": call.base_call,
        "base_len": call.base_len,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": len(call.output_ids),
        "cached_tokens": call.cached_tokens,
        "sampling": call.sampling,
        "marks": call.marks,
        "rerender": call.rerender,
        "finish": call.finish,
        "engine": call.engine,
        "versions": [[span.version, span.start, span.end] for span in call.versions],
        "delivered": call.delivered,
        "at": call.at,
        "first_token_at": call.first_token_at,
        "done_at": call.done_at,
    }
    return _indented({**facts, "request": _json(call.request), "reply": _json(call.message)})


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data) if data else None
    except msgspec.DecodeError:
        return data.decode("utf-8", "replace")


def _indented(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode("utf-8", "replace")


def _asked(call: Call, conversations: Conversations) -> ModelRequest:
    tools = [responses_tool(tool) for tool in conversations.tools(call.number)]
    return ModelRequest(
        model=conversations.model(call.number),
        items=(),
        tools_raw=b"",
        read_tools=lambda raw: (),
        sampling=SamplingRequest(),
        stream=False,
        dialect=call.dialect,
        extras={
            "usage": True,
            "tools": msgspec.json.encode(tools),
            "sealed": False,
            "instructions": None,
            "sse": False,
        },
    )


# -- requests ----------------------------------------------------------------------------------------------


def chat_request(parts: Sequence[Part], tools: Sequence[Tool]) -> JSON:
    """OpenAI Chat Completions."""
    body: JSON = {"messages": as_messages([Said(part) for part in parts])}
    return body if not tools else {**body, "tools": [tool.as_openai() for tool in tools]}


def messages_request(parts: Sequence[Part], tools: Sequence[Tool]) -> JSON:
    """Anthropic Messages."""
    system = [part.text for part in parts if part.kind == "system"]
    messages: list[JSON] = []
    for part in parts:
        if part.kind == "system":
            continue
        role = "user" if part.kind in ("user", "result") else "assistant"
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append(_block(part))
    body: JSON = {"system": "\n\n".join(system)} if system else {}
    body["messages"] = messages
    if tools:
        body["tools"] = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    return body


def _block(part: Part) -> JSON:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": signature(part.text)}
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json_object(part.text)}
    if part.kind == "result":
        return {"type": "tool_result", "tool_use_id": part.call_id, "content": part.text}
    return {"type": "text", "text": part.text}


def responses_request(parts: Sequence[Part], tools: Sequence[Tool]) -> JSON:
    """OpenAI Responses."""
    body: JSON = {}
    if parts and parts[0].kind == "system":
        body["instructions"], parts = parts[0].text, parts[1:]
    body["input"] = [_item(part) for part in parts]
    return body if not tools else {**body, "tools": [responses_tool(tool) for tool in tools]}


def responses_tool(tool: Tool) -> JSON:
    """A tool in the Responses dialect."""
    facts: JSON = {"type": tool.kind, "name": tool.name, "description": tool.description}
    if tool.kind == "function":
        facts["parameters"] = tool.parameters
    return {"type": "namespace", "name": tool.namespace, "tools": [facts]} if tool.namespace else facts


def _item(part: Part) -> JSON:
    if part.kind == "reasoning":
        return {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning(part.text)}
    if part.kind == "call":
        return {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": part.text}
    if part.kind == "result":
        return {"type": "function_call_output", "call_id": part.call_id, "output": part.text}
    role = {"system": "developer", "user": "user"}.get(part.kind, "assistant")
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": part.text}]}


def gemini_request(parts: Sequence[Part], tools: Sequence[Tool]) -> JSON:
    """Google Gemini."""
    system = [{"text": part.text} for part in parts if part.kind == "system"]
    contents: list[JSON] = []
    for part in parts:
        if part.kind == "system":
            continue
        role = "user" if part.kind in ("user", "result") else "model"
        if not contents or contents[-1]["role"] != role:
            contents.append({"role": role, "parts": []})
        contents[-1]["parts"].append(_gemini_part(part))
    body: JSON = {"systemInstruction": {"parts": system}} if system else {}
    body["contents"] = contents
    if tools:
        declared = [{"name": t.name, "description": t.description, "parametersJsonSchema": t.parameters} for t in tools]
        body["tools"] = [{"functionDeclarations": declared}]
    return body


def _gemini_part(part: Part) -> JSON:
    if part.kind == "reasoning":
        return {"text": part.text, "thought": True, "thoughtSignature": sign(part.text)}
    if part.kind == "call":
        return {"functionCall": {"id": part.call_id, "name": part.name, "args": json_object(part.text)}}
    if part.kind == "result":
        return {"functionResponse": {"id": part.call_id, "name": part.name, "response": {"output": part.text}}}
    return {"text": part.text}


_REQUESTS: dict[str, Callable[[Sequence[Part], Sequence[Tool]], JSON]] = {
    "chat": chat_request,
    "messages": messages_request,
    "responses": responses_request,
    "gemini": gemini_request,
}
_DIALECTS: dict[str, Callable[[], Dialect]] = {
    "chat": ChatDialect,
    "messages": MessagesDialect,
    "responses": ResponsesDialect,
    "gemini": GeminiDialect,
}
