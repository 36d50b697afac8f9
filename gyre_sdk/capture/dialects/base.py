"""What every dialect does: read a request, write a reply (whole or streamed), write errors in its provider's shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from gyre_sdk.capture.model import ModelRequest, ParsedReply, Reply
from gyre_sdk.errors import ContextOverflowError, EngineError, GyreError, RequestError, StorageError

T = TypeVar("T")
JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came in."""

    body: bytes
    headers: Mapping[str, str]
    """Lower-case names."""
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    path_params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ident:
    """Names for a reply; made from execution and call, so a replay carries the same ones."""

    execution: str
    call: int
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int = 0

    def named(self, prefix: str) -> str:
        """`<prefix><execution><call>`, unique for ever."""
        return f"{prefix}{self.execution}{self.call:06d}"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error, before a dialect gives it its shape."""

    status: int
    message: str
    kind: str
    """invalid_request | authentication | permission | not_found | too_large | rate_limit | overloaded | server | gone"""
    code: str | None = None
    retry_after: float | None = None
    overflow: tuple[int, int] | None = None
    """(prompt tokens, limit) of a context overflow."""


KINDS = {
    400: "invalid_request",
    401: "authentication",
    403: "permission",
    404: "not_found",
    405: "invalid_request",
    409: "invalid_request",
    410: "gone",
    413: "too_large",
    429: "rate_limit",
    503: "overloaded",
}


def problem_of(error: GyreError, retry_after: float) -> Problem:
    """Status, kind and code of an error. 429 and 503 always say when to come back: some clients give up otherwise."""
    if isinstance(error, ContextOverflowError):
        overflow = (error.prompt_tokens or 0, error.limit or 0)
        return Problem(400, str(error), "invalid_request", "context_length_exceeded", overflow=overflow)
    if isinstance(error, RequestError):
        status = error.status
        after = getattr(error, "retry_after", None) or retry_after
        kind = KINDS.get(status, "invalid_request" if status < 500 else "server")
        return Problem(status, str(error), kind, error.code, after if status in (429, 503) else None)
    if isinstance(error, StorageError):
        return Problem(507, str(error), "server", "storage")
    refused = getattr(error, "status", None)
    after = getattr(error, "retry_after", None) or retry_after
    if refused == 429:
        return Problem(429, str(error), "rate_limit", "engine_overloaded", after)
    if isinstance(error, EngineError):
        return Problem(503, str(error), "overloaded", "engine_unavailable", after)
    return Problem(500, str(error), "server", "internal_error")


class StreamWriter(ABC):
    """Writes one reply as a stream. Every method returns bytes to send; `finish` ends with the terminal event."""

    def __init__(self) -> None:
        self.deltas = Deltas()

    @abstractmethod
    def start(self) -> bytes:
        """The opening events; sent with the first token, or with the first sign of life."""

    @abstractmethod
    def partial(self, partial: ParsedReply) -> bytes:
        """What a partial reply adds."""

    @abstractmethod
    def finish(self, reply: Reply) -> bytes:
        """What is left of the whole reply, and the terminal event."""

    @abstractmethod
    def error(self, problem: Problem) -> bytes:
        """The dialect's error event; the connection is cut after it."""

    def idle(self) -> bytes:
        """A sign of life that means nothing."""
        return b": keep-alive\n\n"


class Dialect(ABC):
    """One provider's wire format. Stateless."""

    name: str

    @abstractmethod
    def parse(self, incoming: Incoming) -> ModelRequest:
        """Raises RequestError for a body that can't be served."""

    @abstractmethod
    def reply(self, request: ModelRequest, reply: Reply, ident: Ident) -> JSON:
        """The whole reply's body."""

    @abstractmethod
    def stream(self, request: ModelRequest, ident: Ident) -> StreamWriter:
        """A writer for a streamed reply."""

    @abstractmethod
    def error(self, problem: Problem) -> JSON:
        """The body of an error."""

    def stream_type(self, request: ModelRequest) -> str:
        """Content type of a stream."""
        return "text/event-stream; charset=utf-8"

    def counts(self, incoming: Incoming) -> bool:
        """Whether the request only asks how many tokens it has."""
        return False

    def count(self, tokens: int) -> JSON:
        """The answer to such a request."""
        return {"total_tokens": tokens}

    def models(self, name: str) -> JSON:
        """The list of models: one."""
        model = {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}
        return {"object": "list", "data": [model]}


class Deltas:
    """Cuts growing text into pieces to send. What was sent is never taken back."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.text = ""

    def step(self, partial: ParsedReply) -> tuple[str, str]:
        """New (reasoning, text) of a partial reply. An end that may still change (split characters, blanks) waits."""
        return self._more(_stable(partial.reasoning), _stable(partial.text))

    def rest(self, reply: Reply) -> tuple[str, str]:
        """New (reasoning, text) of the whole reply."""
        return self._more(reply.reasoning, reply.text)

    def _more(self, reasoning: str, text: str) -> tuple[str, str]:
        new_reasoning, new_text = _behind(self.reasoning, reasoning), _behind(self.text, text)
        self.reasoning += new_reasoning
        self.text += new_text
        return new_reasoning, new_text


def _behind(sent: str, whole: str) -> str:
    """What of `whole` was not sent. Families strip white space in front only once they have seen the end."""
    if whole.startswith(sent):
        return whole[len(sent) :]
    sent, whole = sent.lstrip(), whole.lstrip()
    return whole[len(sent) :] if whole.startswith(sent) else ""


def _stable(text: str) -> str:
    return text.rstrip("\ufffd").rstrip()


def sse(data: object, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def decode(body: bytes, type: type[T], what: str = "the body") -> T:
    """JSON of a known form. Raises RequestError that says where it is wrong."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise RequestError(f"{what}: {error}", code="invalid_body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {error}", code="invalid_json") from error


def refuse(field: str, why: str) -> NoReturn:
    """Refuse a field that can't be honoured and must not be ignored."""
    raise RequestError(f"{field}: {why}", code="unsupported_field")


def check_stop(stop: object) -> None:
    """Stop strings are refused: the engine stops at tokens, and a cut reply would not be what was sampled."""
    if stop:
        refuse("stop", "stop strings are not supported; replies end at the model's own end-of-turn token")
