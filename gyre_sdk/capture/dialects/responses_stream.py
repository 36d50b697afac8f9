"""Writing Responses: output items, the response object, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gyre_sdk.capture.dialects.base import JSON, Ident, Problem, StreamWriter, sse
from gyre_sdk.capture.model import ModelRequest, ParsedReply, Reply, Tool, ToolCall, json_object

Seal = Callable[[str], str] | None


def usage(reply: Reply) -> JSON:
    """Token counts, as they are."""
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }


def response(request: ModelRequest, ident: Ident, status: str, output: list[JSON], **more: object) -> dict[str, Any]:
    """The response object."""
    return {
        "id": ident.named("resp_"),
        "object": "response",
        "created_at": ident.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.extras["instructions"],
        "max_output_tokens": request.sampling.max_tokens,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
        **more,
    }


def final_response(request: ModelRequest, ident: Ident, output: list[JSON], reply: Reply) -> dict[str, Any]:
    """The finished response."""
    cut = reply.finish == "length"
    return response(
        request,
        ident,
        "incomplete" if cut else "completed",
        output,
        usage=usage(reply),
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
    )


def reasoning_item(ident: Ident, reasoning: str, seal: Seal) -> dict[str, Any]:
    """A reasoning item; its summary is the reasoning itself."""
    item: dict[str, Any] = {
        "id": ident.named("rs_"),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": reasoning}] if reasoning else [],
    }
    if seal is not None:
        item["encrypted_content"] = seal(reasoning) if reasoning else ""
    return item


def message_item(ident: Ident, text: str, status: str = "completed") -> dict[str, Any]:
    """An assistant message; no content yet while it is in progress."""
    content = [] if status == "in_progress" else [_text_part(text)]
    return {"id": ident.named("msg_"), "type": "message", "status": status, "role": "assistant", "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def call_item(ident: Ident, index: int, call: ToolCall, tools: Mapping[str, Tool], status: str) -> dict[str, Any]:
    """A function call, or a custom tool's call with its free text."""
    tool = tools.get(call.name)
    head: dict[str, Any] = {"status": status, "call_id": call.id, "name": call.name}
    open_ = status == "in_progress"
    if tool is not None and tool.kind == "custom":
        text = "" if open_ else custom_input(call)
        return {"id": f"{ident.named('ctc_')}{index:03d}", "type": "custom_tool_call", "input": text, **head}
    if tool is not None and tool.namespace:
        head["namespace"] = tool.namespace
    arguments = "" if open_ else call.arguments
    return {"id": f"{ident.named('fc_')}{index:03d}", "type": "function_call", "arguments": arguments, **head}


def custom_input(call: ToolCall) -> str:
    """The free text of a custom tool's call."""
    value = json_object(call.arguments)
    if isinstance(value, dict):
        text = value.get("input")
        return text if isinstance(text, str) else call.arguments
    return value


def output_items(
    request: ModelRequest, reply: Reply, ident: Ident, tools: Mapping[str, Tool], seal: Seal
) -> list[JSON]:
    """All items of a reply."""
    items: list[JSON] = []
    if reply.reasoning:
        items.append(reasoning_item(ident, reply.reasoning, seal))
    if reply.text or not reply.calls:
        items.append(message_item(ident, reply.text))
    items += [call_item(ident, index, call, tools, "completed") for index, call in enumerate(reply.calls)]
    return items


class ResponsesStream(StreamWriter):
    """The events of one response, numbered."""

    def __init__(self, request: ModelRequest, ident: Ident, tools: Mapping[str, Tool], seal: Seal) -> None:
        super().__init__()
        self._request = request
        self._ident = ident
        self._tools = tools
        self._seal = seal
        self._number = 0
        self._open = ""
        self._output: list[JSON] = []

    def _event(self, kind: str, **data: object) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return sse(event, event=kind)

    def start(self) -> bytes:
        opening = response(self._request, self._ident, "in_progress", [])
        return self._event("response.created", response=opening) + self._event("response.in_progress", response=opening)

    def idle(self) -> bytes:
        # A comment would not count as life for clients that time events.
        return self._event("keepalive")

    def _added(self, item: JSON) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: JSON) -> bytes:
        out = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def _close(self) -> bytes:
        kind, self._open = self._open, ""
        if kind == "reasoning":
            item = reasoning_item(self._ident, self.deltas.reasoning, self._seal)
            at = {"item_id": item["id"], "output_index": len(self._output), "summary_index": 0}
            text = self.deltas.reasoning
            out = self._event("response.reasoning_summary_text.done", **at, text=text)
            part = {"type": "summary_text", "text": text}
            return out + self._event("response.reasoning_summary_part.done", **at, part=part) + self._done(item)
        if kind == "text":
            item = message_item(self._ident, self.deltas.text)
            at = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
            out = self._event("response.output_text.done", **at, text=self.deltas.text, logprobs=[])
            out += self._event("response.content_part.done", **at, part=_text_part(self.deltas.text))
            return out + self._done(item)
        return b""

    def _pieces(self, reasoning: str, text: str) -> bytes:
        out = b""
        if reasoning and self._open != "text":
            item = reasoning_item(self._ident, "", self._seal)
            at = {"item_id": item["id"], "output_index": len(self._output), "summary_index": 0}
            if self._open != "reasoning":
                self._open = "reasoning"
                out += self._added(item)
                part = {"type": "summary_text", "text": ""}
                out += self._event("response.reasoning_summary_part.added", **at, part=part)
            out += self._event("response.reasoning_summary_text.delta", **at, delta=reasoning)
        if text:
            out += self._open_text()
            at = {"item_id": self._ident.named("msg_"), "output_index": len(self._output), "content_index": 0}
            out += self._event("response.output_text.delta", **at, delta=text, logprobs=[])
        return out

    def _open_text(self) -> bytes:
        if self._open == "text":
            return b""
        out = self._close()
        self._open = "text"
        item = message_item(self._ident, "", "in_progress")
        out += self._added(item)
        at = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        return out + self._event("response.content_part.added", **at, part=_text_part(""))

    def partial(self, partial: ParsedReply) -> bytes:
        return self._pieces(*self.deltas.step(partial))

    def finish(self, reply: Reply) -> bytes:
        out = self._pieces(*self.deltas.rest(reply))
        if not reply.text and not reply.calls:
            out += self._open_text()
        out += self._close()
        for index, call in enumerate(reply.calls):
            out += self._call(index, call)
        final = final_response(self._request, self._ident, self._output, reply)
        kind = "response.incomplete" if final["status"] == "incomplete" else "response.completed"
        return out + self._event(kind, response=final)

    def _call(self, index: int, call: ToolCall) -> bytes:
        item = call_item(self._ident, index, call, self._tools, "completed")
        out = self._added(call_item(self._ident, index, call, self._tools, "in_progress"))
        at = {"item_id": item["id"], "output_index": len(self._output)}
        if item["type"] == "custom_tool_call":
            out += self._event("response.custom_tool_call_input.delta", **at, delta=item["input"])
            out += self._event("response.custom_tool_call_input.done", **at, input=item["input"])
        else:
            out += self._event("response.function_call_arguments.delta", **at, delta=call.arguments)
            done = {"arguments": call.arguments, "name": call.name}
            out += self._event("response.function_call_arguments.done", **at, **done)
        return out + self._done(item)

    def error(self, problem: Problem) -> bytes:
        error = {"code": problem.code or "server_error", "message": problem.message}
        failed = response(self._request, self._ident, "failed", self._output, error=error)
        return self._event("response.failed", response=failed)
