"""Google Gemini: `generateContent`, `streamGenerateContent` and `countTokens` under `/v1beta/models/MODEL:`."""

from __future__ import annotations

import base64
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
from gyre_sdk.capture.dialects.messages import arguments_object
from gyre_sdk.capture.marks import marks_of
from gyre_sdk.capture.model import Item, ModelRequest, ParsedReply, Part, Reply, SamplingRequest, Tool
from gyre_sdk.errors import RequestError

_STATUS = {
    "invalid_request": "INVALID_ARGUMENT",
    "authentication": "UNAUTHENTICATED",
    "permission": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "too_large": "INVALID_ARGUMENT",
    "rate_limit": "RESOURCE_EXHAUSTED",
    "overloaded": "UNAVAILABLE",
    "gone": "FAILED_PRECONDITION",
}
_SIGNATURE = b"gyre1:"


class _Generation(msgspec.Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    response_json_schema: Any = None
    response_schema: Any = None


class _Body(msgspec.Struct, rename="camel"):
    contents: list[msgspec.Raw]
    system_instruction: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")
    generation_config: _Generation | None = None


class _FunctionCall(msgspec.Struct):
    name: str
    args: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None


class _FunctionResponse(msgspec.Struct):
    name: str
    response: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None
    inline_data: Any = None
    file_data: Any = None


class _Content(msgspec.Struct):
    parts: list[_Part] = []
    role: str | None = None


class _Declaration(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Tool(msgspec.Struct, rename="camel"):
    function_declarations: list[_Declaration] | None = None


def read_system(raw: bytes) -> list[Part]:
    """The system instruction: a string, or content whose texts are joined."""
    content = decode(raw, str | _Content | None, "systemInstruction")  # type: ignore[arg-type]
    if content is None:
        return []
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in content.parts)
    return [Part("system", text)] if text else []


def read_content(raw: bytes) -> list[Part]:
    """Parts of one content."""
    content = decode(raw, _Content, "contents")
    for part in content.parts:
        if part.inline_data is not None or part.file_data is not None:
            refuse("contents", "images, audio and files are not supported; only text and functions are")
    if content.role == "model":
        return _read_model(content.parts)
    if content.role not in (None, "user", "function", "tool"):
        raise RequestError(f"contents: unknown role {content.role!r}")
    parts: list[Part] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            parts.append(Part("user", "\n".join(texts)))
            texts.clear()

    for part in content.parts:
        if part.function_response is not None:
            flush()
            answer = part.function_response
            parts.append(Part("result", _response_text(answer), name=answer.name, call_id=answer.id or ""))
        elif part.text is not None:
            texts.append(part.text)
    flush()
    return parts


def _read_model(content: list[_Part]) -> list[Part]:
    signed = next((text for part in content if (text := _unsigned(part.thought_signature)) is not None), None)
    thought = "".join(part.text or "" for part in content if part.thought)
    text = "".join(part.text or "" for part in content if not part.thought)
    calls = [part.function_call for part in content if part.function_call is not None]
    reasoning = thought if signed is None else signed
    parts = [Part("reasoning", reasoning)] if reasoning else []
    if text or not (parts or calls):
        parts.append(Part("text", text))
    parts += [Part("call", bytes(call.args).decode(), name=call.name, call_id=call.id or "") for call in calls]
    return parts


def _response_text(answer: _FunctionResponse) -> str:
    """The tool's output. `{"output": "text"}`, what clients send for plain text, is that text."""
    raw = bytes(answer.response)
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestError(f"functionResponse: not valid JSON: {error}") from error
    if isinstance(value, dict) and len(value) == 1:
        only = next(iter(value.values()))
        if isinstance(only, str):
            return only
    return raw.decode()


def sign(reasoning: str) -> str:
    """A thought signature that brings the reasoning back: clients keep it even when they drop the thought's text."""
    return base64.b64encode(_SIGNATURE + reasoning.encode("utf-8", "surrogatepass")).decode()


def _unsigned(signature: str | None) -> str | None:
    if not signature:
        return None
    try:
        data = base64.b64decode(signature, validate=True)
    except ValueError:
        return None
    return data.removeprefix(_SIGNATURE).decode("utf-8", "surrogatepass") if data.startswith(_SIGNATURE) else None


def read_tools(raw: bytes) -> tuple[Tool, ...]:
    """Function declarations. Tools that run at the provider (search, code execution) are left out."""
    tools = decode(raw, list[_Tool] | None, "tools") or []  # type: ignore[arg-type]
    return tuple(
        Tool(entry.name, entry.description or "", entry.parameters_json_schema or entry.parameters or {})
        for tool in tools
        for entry in tool.function_declarations or []
    )


class GeminiDialect(Dialect):
    """Google Gemini."""

    name = "gemini"

    def parse(self, incoming: Incoming) -> ModelRequest:
        model, _, method = incoming.path_params.get("target", "").rpartition(":")
        if method not in ("generateContent", "streamGenerateContent", "countTokens"):
            raise RequestError(f"unknown method {method!r}", status=404)
        data = incoming.body
        if method == "countTokens":
            wrapped = decode(data, dict[str, msgspec.Raw]).get("generateContentRequest")
            data = bytes(wrapped) if wrapped is not None else data
        body = decode(data, _Body)
        generation = body.generation_config or _Generation()
        check_stop(generation.stop_sequences)
        if generation.candidate_count not in (None, 1):
            refuse("candidateCount", "only one candidate per request")
        marks = marks_of(incoming.headers)
        if generation.response_json_schema is not None or generation.response_schema is not None:
            marks["schema"] = "1"
        system = bytes(body.system_instruction)
        items = [Item(system, read_system)] if system != b"null" else []
        return ModelRequest(
            model=model,
            items=[*items, *(Item(bytes(raw), read_content) for raw in body.contents)],
            tools_raw=bytes(body.tools),
            read_tools=read_tools,
            sampling=SamplingRequest(
                temperature=generation.temperature,
                top_p=generation.top_p,
                top_k=None if generation.top_k is None else int(generation.top_k),
                max_tokens=generation.max_output_tokens,
            ),
            stream=method == "streamGenerateContent",
            dialect=self.name,
            marks=marks,
            extras={"sse": incoming.query.get("alt") == "sse"},
        )

    def reply(self, request: ModelRequest, reply: Reply, ident: Ident) -> JSON:
        parts: list[dict[str, Any]] = []
        if reply.reasoning:
            parts.append({"text": reply.reasoning, "thought": True})
        if reply.text or not reply.calls:
            parts.append({"text": reply.text})
        parts += call_parts(reply)
        if reply.reasoning:
            parts[1]["thoughtSignature"] = sign(reply.reasoning)
        return chunk(request, ident, parts, reply)

    def stream(self, request: ModelRequest, ident: Ident) -> StreamWriter:
        return _GeminiStream(request, ident)

    def stream_type(self, request: ModelRequest) -> str:
        return super().stream_type(request) if request.extras["sse"] else "application/json; charset=utf-8"

    def error(self, problem: Problem) -> JSON:
        message = problem.message
        if problem.overflow is not None:
            tokens, limit = problem.overflow
            message = f"The input token count ({tokens}) exceeds the maximum number of tokens allowed ({limit})."
        error: dict[str, Any] = {
            "code": problem.status,
            "message": message,
            "status": _STATUS.get(problem.kind, "INTERNAL"),
        }
        if problem.retry_after is not None:
            delay = f"{problem.retry_after:g}s"
            error["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
        return {"error": error}

    def counts(self, incoming: Incoming) -> bool:
        return incoming.path.endswith(":countTokens")

    def count(self, tokens: int) -> JSON:
        return {"totalTokens": tokens}

    def models(self, name: str) -> JSON:
        methods = ["generateContent", "streamGenerateContent", "countTokens"]
        return {"models": [{"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}]}


def call_parts(reply: Reply) -> list[dict[str, Any]]:
    """Function calls as parts."""
    return [
        {"functionCall": {"id": call.id, "name": call.name, "args": arguments_object(call)}} for call in reply.calls
    ]


def chunk(request: ModelRequest, ident: Ident, parts: list[dict[str, Any]], reply: Reply | None) -> JSON:
    """One GenerateContentResponse; the last of a stream when it carries the whole `reply`'s end."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    data: dict[str, Any] = {
        "candidates": [candidate],
        "modelVersion": request.model,
        "responseId": ident.named("gyre-"),
    }
    if reply is None:
        return data
    candidate["finishReason"] = "MAX_TOKENS" if reply.finish == "length" else "STOP"
    data["usageMetadata"] = {
        "promptTokenCount": reply.prompt_tokens,
        "cachedContentTokenCount": reply.cached_tokens,
        "candidatesTokenCount": reply.output_tokens - reply.reasoning_tokens,
        "thoughtsTokenCount": reply.reasoning_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.output_tokens,
    }
    return data


class _GeminiStream(StreamWriter):
    def __init__(self, request: ModelRequest, ident: Ident) -> None:
        super().__init__()
        self._request = request
        self._ident = ident
        self._sse = bool(request.extras["sse"])
        self._first = True
        self._signed = False

    def _send(self, data: JSON) -> bytes:
        if self._sse:
            return sse(data)
        head = b"[" if self._first else b",\r\n"
        self._first = False
        return head + msgspec.json.encode(data)

    def start(self) -> bytes:
        return b""

    def idle(self) -> bytes:
        # Not every client knows comments: a chunk that says nothing new is safe in all of them.
        if not self._sse:
            return b" "
        return self._send({"usageMetadata": {"promptTokenCount": self._ident.prompt_tokens}})

    def _pieces(self, reasoning: str, text: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if reasoning:
            parts.append({"text": reasoning, "thought": True})
        if text:
            parts.append({"text": text})
        return parts

    def partial(self, partial: ParsedReply) -> bytes:
        reasoning, text = self.deltas.step(partial)
        # A stream's first byte leaves with the first token, even when that token shows nothing yet.
        parts = self._pieces(reasoning, text)
        if text and self.deltas.reasoning and not self._signed:
            self._signed = True
            parts[-1]["thoughtSignature"] = sign(partial.reasoning)
        return self._send(chunk(self._request, self._ident, parts, None)) if parts else b""

    def finish(self, reply: Reply) -> bytes:
        reasoning, text = self.deltas.rest(reply)
        parts = self._pieces(reasoning, text) + call_parts(reply)
        if not parts:
            parts = [{"text": ""}]
        said = [part for part in parts if not part.get("thought")]
        if reply.reasoning and not self._signed and said:
            said[0]["thoughtSignature"] = sign(reply.reasoning)
        return self._send(chunk(self._request, self._ident, parts, reply)) + (b"" if self._sse else b"]")

    def error(self, problem: Problem) -> bytes:
        # In a stream of events too, the provider sends its errors as bare JSON: only so does its JavaScript client
        # see one, and the CLI then asks again; after a mere reset it gives up.
        error = GeminiDialect().error(problem)
        return msgspec.json.encode(error) + b"\r\n" if self._sse else self._send(error)
