"""A minimal client of each dialect: keeps its own history the way real clients do, and reads replies whole or streamed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import httpx

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "a": {}, "b": {}}}


@dataclass
class Heard:
    """What a client understood of a reply."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    """(id, name, arguments as an object)"""
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: list[str] = field(default_factory=list)


class Speaker(ABC):
    """A client of one dialect."""

    name: str
    path: str

    def __init__(self, http: httpx.AsyncClient, *, tools: bool = True) -> None:
        self.http = http
        self.tools = tools
        self.history: list[dict[str, Any]] = []

    @abstractmethod
    def user(self, text: str) -> None: ...

    @abstractmethod
    def results(self, heard: Heard, outputs: list[str]) -> None: ...

    @abstractmethod
    def body(self, stream: bool) -> dict[str, Any]: ...

    @abstractmethod
    def read(self, data: dict[str, Any]) -> Heard: ...

    @abstractmethod
    def read_stream(self, events: list[dict[str, Any]]) -> Heard: ...

    def url(self, stream: bool) -> str:
        return self.path

    async def say(self, text: str | None = None, *, stream: bool = False) -> Heard:
        if text is not None:
            self.user(text)
        if not stream:
            response = await self.http.post(self.url(False), json=self.body(False))
            assert response.status_code == 200, response.text
            return self.read(response.json())
        async with self.http.stream("POST", self.url(True), json=self.body(True)) as response:
            assert response.status_code == 200, await response.aread()
            raw = [line async for line in response.aiter_lines()]
        data = [line[6:] for line in raw if line.startswith("data: ")]
        heard = self.read_stream([json.loads(line) for line in data if line != "[DONE]"])
        heard.events = [line[7:] for line in raw if line.startswith("event: ")] or data
        return heard


class Chat(Speaker):
    name, path = "chat", "/v1/chat/completions"

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, heard: Heard, outputs: list[str]) -> None:
        for (id_, _, _), output in zip(heard.calls, outputs):
            self.history.append({"role": "tool", "tool_call_id": id_, "content": output})

    def body(self, stream: bool) -> dict[str, Any]:
        function = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
        tools = {"tools": [{"type": "function", "function": function}]} if self.tools else {}
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {"model": "m", "messages": self.history, **tools, **options}

    def _heard(self, message: dict[str, Any], finish: str, usage: dict[str, int]) -> Heard:
        self.history.append({"role": "assistant", **{k: v for k, v in message.items() if v and k != "role"}})
        calls = [
            (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in message.get("tool_calls") or ()
        ]
        return Heard(
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            calls=calls,
            finish={"stop": "stop", "tool_calls": "calls", "length": "length"}[finish],
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
        )

    def read(self, data: dict[str, Any]) -> Heard:
        choice = data["choices"][0]
        return self._heard(choice["message"], choice["finish_reason"], data["usage"])

    def read_stream(self, events: list[dict[str, Any]]) -> Heard:
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        finish = ""
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                message["reasoning_content"] += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or ():
                    if "id" in call:
                        entry = {
                            "id": call["id"],
                            "type": "function",
                            "function": {"name": call["function"]["name"], "arguments": ""},
                        }
                        message["tool_calls"].append(entry)
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                finish = choice["finish_reason"] or finish
        return self._heard(message, finish, events[-1]["usage"])


class Messages(Speaker):
    name, path = "messages", "/v1/messages?beta=true"

    def user(self, text: str) -> None:
        self.history.append(
            {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}
        )

    def results(self, heard: Heard, outputs: list[str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": c[0], "content": [{"type": "text", "text": o}]}
            for c, o in zip(heard.calls, outputs)
        ]
        self.history.append({"role": "user", "content": blocks})

    def body(self, stream: bool) -> dict[str, Any]:
        tools = (
            {"tools": [{"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}]}
            if self.tools
            else {}
        )
        return {"model": "m", "max_tokens": 1000, "messages": self.history, "stream": stream, **tools}

    def read(self, data: dict[str, Any]) -> Heard:
        # As Claude Code does: keys of arguments in the schema's order, cache_control off older messages.
        for message in self.history:
            if isinstance(message["content"], list):
                for block in message["content"]:
                    block.pop("cache_control", None)
        content = [
            {**b, "input": {k: b["input"][k] for k in ("command", "a", "b") if k in b["input"]}}
            if b["type"] == "tool_use"
            else b
            for b in data["content"]
        ]
        self.history.append({"role": "assistant", "content": content})
        usage = data["usage"]
        return Heard(
            text="".join(b["text"] for b in content if b["type"] == "text"),
            reasoning="".join(b["thinking"] for b in content if b["type"] == "thinking"),
            calls=[(b["id"], b["name"], b["input"]) for b in content if b["type"] == "tool_use"],
            finish={"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}[data["stop_reason"]],
            prompt_tokens=usage["input_tokens"] + usage["cache_read_input_tokens"],
            output_tokens=usage["output_tokens"],
        )

    def read_stream(self, events: list[dict[str, Any]]) -> Heard:
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "message_stop"
        message = events[0]["message"]
        partial: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            elif event["type"] == "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
                else:
                    key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[
                        delta["type"]
                    ]
                    block[key] += delta[key]
            elif event["type"] == "content_block_stop" and event["index"] in partial:
                message["content"][event["index"]]["input"] = json.loads(partial[event["index"]])
            elif event["type"] == "message_delta":
                message.update(event["delta"])
                message["usage"].update(event["usage"])
        assert all(b.get("signature") for b in message["content"] if b["type"] == "thinking")
        return self.read(message)


class Responses(Speaker):
    name, path = "responses", "/v1/responses"

    def user(self, text: str) -> None:
        self.history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})

    def results(self, heard: Heard, outputs: list[str]) -> None:
        for (id_, _, _), output in zip(heard.calls, outputs):
            self.history.append({"type": "function_call_output", "call_id": id_, "output": output})

    def body(self, stream: bool) -> dict[str, Any]:
        tools = [
            {
                "type": "function",
                "name": "bash",
                "description": "Run a command.",
                "parameters": PARAMETERS,
                "strict": False,
            }
        ]
        return {
            "model": "m",
            "input": self.history,
            "stream": stream,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": tools if self.tools else [],
            "tool_choice": "auto",
        }

    def read(self, data: dict[str, Any]) -> Heard:
        output = data["output"]
        self.history += output
        usage = data["usage"]
        calls = [(i["call_id"], i["name"], json.loads(i["arguments"])) for i in output if i["type"] == "function_call"]
        finish = "calls" if calls else "stop"
        return Heard(
            text="".join(p["text"] for i in output if i["type"] == "message" for p in i["content"]),
            reasoning="".join(p["text"] for i in output if i["type"] == "reasoning" for p in i["summary"]),
            calls=calls,
            finish="length" if data["status"] == "incomplete" else finish,
            prompt_tokens=usage["input_tokens"],
            output_tokens=usage["output_tokens"],
        )

    def read_stream(self, events: list[dict[str, Any]]) -> Heard:
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        final = events[-1]["response"]
        assert items == final["output"]
        text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        heard = self.read(final)
        assert text == heard.text
        return heard


class Gemini(Speaker):
    name, path = "gemini", "/v1beta/models/m:"

    def url(self, stream: bool) -> str:
        return self.path + ("streamGenerateContent?alt=sse" if stream else "generateContent")

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "parts": [{"text": text}]})

    def results(self, heard: Heard, outputs: list[str]) -> None:
        parts = [
            {"functionResponse": {"id": f"invented-{i}", "name": c[1], "response": {"output": o}}}
            for i, (c, o) in enumerate(zip(heard.calls, outputs))
        ]
        self.history.append({"role": "user", "parts": parts})

    def body(self, stream: bool) -> dict[str, Any]:
        declaration = {"name": "bash", "description": "Run a command.", "parametersJsonSchema": PARAMETERS}
        tools = {"tools": [{"functionDeclarations": [declaration]}]} if self.tools else {}
        config = {"temperature": 1, "topK": 64, "thinkingConfig": {"includeThoughts": True}}
        return {"contents": self.history, "generationConfig": config, **tools}

    def read(self, data: dict[str, Any]) -> Heard:
        candidate = data["candidates"][0]
        parts = candidate["content"]["parts"]
        # As Gemini CLI does: the thought's text is dropped, signatures stay, calls get ids of its own.
        kept = [dict(p) for p in parts if not p.get("thought")]
        for number, part in enumerate(kept):
            if "functionCall" in part:
                part["functionCall"] = {**part["functionCall"], "id": f"invented-{number}"}
        self.history.append({"role": "model", "parts": kept})
        usage = data["usageMetadata"]
        calls = [
            (p["functionCall"]["id"], p["functionCall"]["name"], p["functionCall"]["args"])
            for p in parts
            if "functionCall" in p
        ]
        finish = "calls" if calls else "stop"
        return Heard(
            text="".join(p.get("text", "") for p in parts if not p.get("thought")),
            reasoning="".join(p["text"] for p in parts if p.get("thought")),
            calls=calls,
            finish="length" if candidate["finishReason"] == "MAX_TOKENS" else finish,
            prompt_tokens=usage["promptTokenCount"],
            output_tokens=usage["candidatesTokenCount"] + usage["thoughtsTokenCount"],
        )

    def read_stream(self, events: list[dict[str, Any]]) -> Heard:
        parts: list[dict[str, Any]] = []
        for event in events:
            for candidate in event.get("candidates", ()):
                for part in candidate["content"]["parts"]:
                    same = (
                        parts
                        and "text" in part
                        and "text" in parts[-1]
                        and part.get("thought") == parts[-1].get("thought")
                    )
                    if same:
                        parts[-1]["text"] += part["text"]
                        parts[-1].update({k: v for k, v in part.items() if k == "thoughtSignature"})
                    else:
                        parts.append(dict(part))
        final = events[-1]
        final["candidates"][0]["content"]["parts"] = parts
        return self.read(final)


SPEAKERS: list[type[Speaker]] = [Chat, Messages, Responses, Gemini]
