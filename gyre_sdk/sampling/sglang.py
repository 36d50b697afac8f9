"""A TokenClient for what speaks SGLang's native HTTP contract: SGLang, the embedded engine, Gyre's router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np

from gyre_sdk.errors import ContextOverflowError, EngineError, EngineGoneError
from gyre_sdk.sampling.types import Chunk, Completion, Finish, GenerateRequest, ModelInfo
from gyre_sdk.wire.records import Span

_OVERFLOW_WORDS = ("context length", "context_length", "too long", "longer than", "max_new_tokens")
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangClient:
    """Streams `/generate`. Servers that stream cumulative ids and servers that stream only new ones are told apart.

    `read_timeout_s` bounds the silence between two pieces of a reply (None waits for ever: hours of queueing are
    legitimate, and a dead server closes the connection).
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        read_timeout_s: float | None = None,
        connect_timeout_s: float = 10.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = http or httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(connect_timeout_s, read=read_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Completion]:
        """See `TokenClient.generate`."""
        body: dict[str, Any] = {
            "rid": request.rid,
            "input_ids": request.input_ids.tolist(),
            "sampling_params": request.sampling.to_params(),
            "return_logprob": True,
            "stream": True,
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.session:
            body["session_id"] = request.session
        reply = _Reply(self.base_url)
        try:
            url, headers = f"{self.base_url}/generate", {"Content-Type": "application/json"}
            content = msgspec.json.encode(body)
            async with self._http.stream("POST", url, content=content, headers=headers) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        continue  # to the very end: only a connection that was read out is used again
                    chunk = reply.take(msgspec.json.decode(data))
                    if chunk is not None:
                        yield chunk
        except httpx.TransportError as error:
            raise EngineGoneError(f"{self.base_url}: {type(error).__name__} {error}".rstrip()) from error
        yield reply.completion()

    async def abort(self, rid: str) -> None:
        """Fire and forget; an engine that can't be reached has nothing left to abort."""
        try:
            await self._http.post(f"{self.base_url}/abort_request", json={"rid": rid}, timeout=10.0)
        except httpx.TransportError:
            return

    async def model_info(self) -> ModelInfo:
        """From `/model_info`, and `/server_info` for what is not there. Raises EngineGoneError, EngineError."""
        info = await self._get("/model_info")
        more = info if {"context_length", "vocab_size"} <= info.keys() else await self._get("/server_info")
        return ModelInfo(
            model=str(info.get("model_path", "")),
            vocab_size=int(info.get("vocab_size") or more.get("vocab_size") or 0),
            context_length=int(info.get("context_length") or _context_length(more)),
            weight_version=_version(info.get("weight_version", 0)),
        )

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(f"{self.base_url}{path}", timeout=30.0)
        except httpx.TransportError as error:
            raise EngineGoneError(f"{self.base_url}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.text)
        data: dict[str, Any] = answer.json()
        return data


class _Reply:
    """Puts a streamed reply together. Ids may come cumulatively (SGLang's default) or piece by piece."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.meta: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> Chunk | None:
        """New tokens of one SSE event. Raises EngineError when the event is an error."""
        if "error" in event:
            error = event["error"]
            message = error.get("message", error) if isinstance(error, Mapping) else error
            code = error.get("code", 500) if isinstance(error, Mapping) else 500
            raise _refusal(int(code) if str(code).isdigit() else 500, str(message))
        meta: Mapping[str, Any] = event.get("meta_info", {})
        total = int(meta.get("completion_tokens", 0))
        ids: Sequence[int] = event.get("output_ids") or ()
        logprobs: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
        new_ids = ids[len(self.ids) :] if len(ids) == total else ids
        new_logprobs = logprobs[len(self.logprobs) :] if len(logprobs) == total else logprobs
        self.meta = meta
        self.ids += new_ids
        self.logprobs += [float(entry[0]) for entry in new_logprobs]
        if len(self.ids) != total or len(self.logprobs) != total:
            raise EngineError(
                f"{self.engine}: {len(self.ids)} ids and {len(self.logprobs)} logprobs for {total} tokens"
            )
        if not new_ids:
            return None
        return Chunk(
            np.asarray(new_ids, np.int32),
            np.asarray(self.logprobs[-len(new_ids) :], np.float32),
            _version(meta["weight_version"]) if "weight_version" in meta else None,
        )

    def completion(self) -> Completion:
        """Raises EngineGoneError when the stream ended before the reply did."""
        finish = self.meta.get("finish_reason")
        if not isinstance(finish, Mapping):
            raise EngineGoneError(f"{self.engine}: the stream ended after {len(self.ids)} tokens without an end")
        return Completion(
            finish=_FINISHES.get(str(finish.get("type")), "error"),
            output_ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=_spans(self.meta, len(self.ids)),
            prompt_tokens=int(self.meta.get("prompt_tokens", 0)),
            cached_tokens=int(self.meta.get("cached_tokens", 0)),
            engine=str(self.meta.get("engine", self.engine)),
        )


def _spans(meta: Mapping[str, Any], count: int) -> tuple[Span, ...]:
    spans = tuple(
        Span(_version(part["version"]), int(part["start"]), min(int(part["end"]), count))
        for part in meta.get("weight_versions") or ()
        if int(part["start"]) < count
    )
    if spans or not count:
        return spans
    return (Span(_version(meta.get("weight_version", 0)), 0, count),)


def _version(value: object) -> int:
    """SGLang's versions are strings; ours are numbers. `default`, its name for none, is 0."""
    text = str(value)
    return int(text) if text.lstrip("-").isdigit() else 0


def _context_length(info: Mapping[str, Any]) -> int:
    states = info.get("internal_states") or [{}]
    candidates = (
        info.get("context_length"),
        info.get("max_req_input_len"),
        states[0].get("max_req_input_len"),
    )
    return next((int(value) for value in candidates if value), 0)


def _refusal(status: int, text: str) -> EngineError:
    try:
        data = msgspec.json.decode(text)
        error = data.get("error", data) if isinstance(data, dict) else data
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    except msgspec.DecodeError:
        message = text
    message = message.strip()[:500] or f"HTTP {status}"
    if status in (502, 503, 504):
        return EngineGoneError(f"engine unavailable ({status}): {message}")
    if status in (400, 413, 422) and any(word in message.lower() for word in _OVERFLOW_WORDS):
        return ContextOverflowError(message)
    refused = EngineError(f"the engine refused the call ({status}): {message}")
    refused.status = status
    return refused
