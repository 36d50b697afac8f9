"""Requests that are almost right: real ones of every dialect, with something in them replaced, removed or added."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "a": {"type": "integer"}}, "required": ["a"]}

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "user", "content": "go on"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "max_tokens": 20,
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 20,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "t1", "name": "bash", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}]},
    ],
    "tools": [{"name": "bash", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 100},
    "metadata": {"user_id": "{}"},
    "stream": True,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
        {"type": "function_call", "id": "f1", "call_id": "c1", "name": "bash", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"role": "user", "content": "go on"},
    ],
    "tools": [
        {"type": "function", "name": "bash", "description": "d", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"k": "v"},
    "prompt_cache_key": "p",
    "max_output_tokens": 20,
    "stream": True,
}
GEMINI: dict[str, Any] = {
    "systemInstruction": {"role": "user", "parts": [{"text": "be brief"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"functionCall": {"name": "bash", "args": {"a": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "x"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "bash", "description": "d", "parametersJsonSchema": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {"temperature": 1, "topK": 64, "maxOutputTokens": 20, "thinkingConfig": {"includeThoughts": True}},
}  # fmt: skip
DIALECTS = {
    "chat": (("/v1/chat/completions",), CHAT),
    "messages": (("/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"), MESSAGES),
    "responses": (("/v1/responses",), RESPONSES),
    "gemini": (
        (
            "/v1beta/models/m:generateContent",
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            "/v1beta/models/m:countTokens",
            "/v1beta/models/m:nonsense",
        ),
        GEMINI,
    ),
}

Json = Any
_NAMES = ("role", "type", "content", "text", "name", "id", "arguments", "input", "parts", "x", "")
_LEAVES: tuple[Json, ...] = (
    None, True, False, 0, 1, -1, 3, 10**30, 0.5, -2.5, 1e308, float("nan"), float("inf"), "", "\x00", "\ud800", "{", "x" * 50,
    "<|im_end|>", "user", "tool", "assistant", "system", "auto", "text", "\u0627\u4e2d\U0001f600", "../../etc", "\r\n",
)  # fmt: skip


def junk(random: Random, depth: int = 3) -> Json:
    """Any JSON, small."""
    kind = random.random()
    if depth == 0 or kind < 0.6:
        return random.choice(_LEAVES)
    inner = [junk(random, depth - 1) for _ in range(random.randint(0, 3))]
    return inner if kind < 0.8 else {random.choice(_NAMES): value for value in inner}


def _places(value: Json, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def mutated(base: dict[str, Any], random: Random) -> bytes:
    """A body with one to three changes, or none of its structure at all, or no JSON."""
    kind = random.choice(["mutated"] * 8 + ["junk", "cut", "bytes"])
    if kind == "junk":
        return dumped(junk(random))
    if kind == "bytes":
        return random.randbytes(random.randint(0, 200))
    body = copy.deepcopy(base)
    for _ in range(random.randint(1, 3)):
        _change(body, random)
    data = dumped(body)
    return data[: random.randint(0, len(data))] if kind == "cut" else data


def _change(body: dict[str, Any], random: Random) -> None:
    places = _places(body)
    if not places:
        return
    *path, last = random.choice(places)
    holder: Json = body
    for key in path:
        holder = holder[key]
    how = random.choice(["replace", "replace", "remove", "add", "double", "deep"])
    if how == "remove":
        del holder[last]
    elif how == "replace":
        holder[last] = junk(random)
    elif how == "deep":
        deep: Json = holder[last]
        for _ in range(random.choice([3, 100, 900])):
            deep = [deep]
        holder[last] = deep
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[int(last)]) if how == "double" else junk(random))
    else:
        holder[random.choice(_NAMES)] = junk(random)


def dumped(value: Json) -> bytes:
    """As JSON; lone surrogates and NaN go out as Python writes them."""
    return json.dumps(value).encode("utf-8", "surrogatepass")
