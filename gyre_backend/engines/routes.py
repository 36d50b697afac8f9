"""SGLang's native HTTP contract over an `EngineCore`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gyre_backend.engines.calls import BadCallError, Call, GenerateBody, Update
from gyre_backend.engines.core import EngineCore
from gyre_backend.engines.kv import KVLayout
from gyre_backend.engines.kv_exchange import KVExchange
from gyre_backend.engines.kv_routes import KVRoutes
from gyre_sdk.errors import EngineError, GyreError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
_generate_body = msgspec.json.Decoder(GenerateBody).decode

REFUSED = ("json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_regex")
"""Sampling parameters that change what is sampled and are not offered: silence would be a lie."""
NEUTRAL = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_new_tokens": 0, "n": 1,
}  # fmt: skip


class Engine(Protocol):
    """What the routes need of an engine."""

    @property
    def core(self) -> EngineCore: ...
    @property
    def name(self) -> str: ...
    @property
    def model_path(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def incremental_streaming(self) -> bool: ...
    @property
    def exchange(self) -> KVExchange: ...
    @property
    def kv_layout(self) -> KVLayout: ...
    def load_from_disk(self, folder: str) -> None: ...
    def checksum(self) -> str: ...


class EngineRoutes:
    """One engine's routes. Control calls run between two steps of the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._updating = False

    def app(self) -> Starlette:
        """The ASGI application."""
        both = ["GET", "POST"]
        routes: list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]] = [
            ("/generate", self._generate, ["POST"]),
            ("/abort_request", self._abort, ["POST"]),
            ("/pause_generation", self._pause, ["POST"]),
            ("/continue_generation", self._continue, ["POST"]),
            ("/flush_cache", self._flush, both),
            ("/model_info", self._model_info, ["GET"]),
            ("/server_info", self._server_info, ["GET"]),
            ("/v1/loads", self._loads, ["GET"]),
            ("/health", self._health, ["GET"]),
            ("/health_generate", self._health, ["GET"]),
            ("/ready", self._ready, ["GET"]),
            ("/begin_weight_update", self._begin, ["POST"]),
            ("/end_weight_update", self._end, ["POST"]),
            ("/update_weights_from_disk", self._update_from_disk, ["POST"]),
            ("/update_weight_version", self._update_version, ["POST"]),
            ("/weights_checker", self._checksum, ["POST"]),
            ("/release_memory_occupation", self._release, ["POST"]),
            ("/resume_memory_occupation", self._resume, ["POST"]),
        ]
        engine = self._engine
        own = [Route(path, _guarded(call), methods=methods) for path, call, methods in routes]
        return Starlette(routes=[*own, *KVRoutes(engine.core, engine.exchange, engine.kv_layout).routes()])

    # ---- generation ----

    async def _generate(self, request: Request) -> Response:
        body = _read_body(await request.body())
        core = self._engine.core
        prompt = body.check(self._engine.vocab_size, core.limits.context_length)
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update] = asyncio.Queue()

        def deliver(update: Update) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(updates.put_nowait, update)

        call = Call(body.rid or uuid.uuid4().hex, prompt, body, deliver)
        began = time.monotonic()
        await asyncio.wrap_future(core.ask(lambda: core.submit(call)))
        if body.stream:
            return _Stream(self._events(call, body, updates, began))
        watch = asyncio.create_task(_disconnected(request))
        try:
            last = await self._last(updates, watch)
        finally:
            watch.cancel()
            core.ask(lambda: core.abort(call.rid))
        assert last.finish is not None
        if last.finish["type"] == "error":
            return _error(str(last.finish["message"]), 500)
        return _json(self._reply(call, body, 0, last, began))

    async def _last(self, updates: asyncio.Queue[Update], gone: asyncio.Task[None]) -> Update:
        while True:
            getter = asyncio.create_task(updates.get())
            await asyncio.wait({getter, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not getter.done():
                getter.cancel()
                raise BadCallError("the client is gone")
            if getter.result().finish is not None:
                return getter.result()

    async def _events(
        self, call: Call, body: GenerateBody, updates: asyncio.Queue[Update], began: float
    ) -> AsyncIterator[bytes]:
        core, sent = self._engine.core, 0
        try:
            while True:
                update = await updates.get()
                while update.finish is None and not updates.empty():
                    update = updates.get_nowait()
                if update.finish is not None and update.finish["type"] == "error":
                    error = {"error": {"message": update.finish["message"], "code": 500}}
                    yield b"data: " + encode(error) + b"\n\n" + _DONE
                    break
                start = sent if self._engine.incremental_streaming else 0
                line = b"data: " + encode(self._reply(call, body, start, update, began)) + b"\n\n"
                sent = update.count
                yield line if update.finish is None else line + _DONE
                if update.finish is not None:
                    break
        finally:
            core.ask(lambda: core.abort(call.rid))

    def _reply(self, call: Call, body: GenerateBody, start: int, update: Update, began: float) -> dict[str, Any]:
        count = update.count
        ids = call.output[:count].tolist()
        meta: dict[str, Any] = {
            "id": call.rid,
            "finish_reason": update.finish,
            "prompt_tokens": call.prompt_tokens,
            "completion_tokens": count,
            "cached_tokens": call.cached_tokens,
            "weight_version": self._engine.core.version,
            "weight_versions": call.versions(count),
            "num_retractions": call.retractions,
            "e2e_latency": time.monotonic() - began,
            "engine": self._engine.name,
        }
        if body.return_logprob:
            logprobs = call.logprobs[:count]
            meta["output_token_logprobs"] = [
                (logprob, token, None) for logprob, token in zip(logprobs[start:], ids[start:])
            ]
            meta["output_token_logprobs_length"] = count
        return {"output_ids": ids[start:], "meta_info": meta}

    async def _abort(self, request: Request) -> Response:
        body = await _fields(request)
        core = self._engine.core
        if body.get("abort_all"):
            await asyncio.wrap_future(core.ask(core.abort_all))
        else:
            rid = body.get("rid")
            if not isinstance(rid, str):
                raise BadCallError("abort_request needs a rid, or abort_all")
            await asyncio.wrap_future(core.ask(lambda: core.abort(rid)))
        return Response(status_code=200)

    # ---- pausing, cache ----

    async def _pause(self, request: Request) -> Response:
        mode = (await _fields(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadCallError(f"mode must be abort, retract or in_place, got {mode!r}")
        core = self._engine.core
        await asyncio.wrap_future(core.ask(lambda: core.pause(mode)))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        core = self._engine.core
        await asyncio.wrap_future(core.ask(core.resume))
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Response:
        core = self._engine.core
        if await asyncio.wrap_future(core.ask(core.flush)):
            return Response("Cache flushed.\n", 200)
        return Response("The cache can't be flushed while requests hold it.\n", 400)

    # ---- information ----

    async def _model_info(self, request: Request) -> Response:
        engine = self._engine
        return _json(
            {
                "model_path": engine.model_path,
                "tokenizer_path": engine.model_path,
                "is_generation": True,
                "weight_version": engine.core.version,
                "vocab_size": engine.vocab_size,
                "context_length": engine.core.limits.context_length,
            }
        )

    async def _server_info(self, request: Request) -> Response:
        limits = self._engine.core.limits
        return _json(
            {
                "engine": "gyre-embedded",
                "model_path": self._engine.model_path,
                "weight_version": self._engine.core.version,
                "vocab_size": self._engine.vocab_size,
                "context_length": limits.context_length,
                "max_running_requests": limits.max_batch,
                "max_total_num_tokens": limits.kv_tokens,
                "internal_states": [{"generated_tokens": self._engine.core.generated_tokens}],
            }
        )

    async def _loads(self, request: Request) -> Response:
        core = self._engine.core
        running, waiting, used = len(core.running), len(core.waiting), core.used_tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": used,
            "num_cached_tokens": core.cached_tokens,
            "max_total_num_tokens": core.limits.kv_tokens,
            "max_running_requests": core.limits.max_batch,
            "token_usage": used / core.limits.kv_tokens,
        }
        return _json({"loads": [load]})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.core.alive else 503)

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=503 if self._engine.core.paused or not self._engine.core.alive else 200)

    # ---- weights ----

    async def _begin(self, request: Request) -> Response:
        self._updating = True
        return _json({"success": True, "message": "weight update begun"})

    async def _end(self, request: Request) -> Response:
        if not self._updating:
            raise BadCallError("end_weight_update() without begin_weight_update()")
        self._updating = False
        return _json({"success": True, "message": "weight update ended"})

    async def _update_from_disk(self, request: Request) -> Response:
        body = await _fields(request)
        folder, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(folder, str):
            raise BadCallError("update_weights_from_disk needs a model_path")
        core = self._engine.core

        def work() -> None:
            self._engine.load_from_disk(folder)
            core.new_version(core.version if version is None else str(version), flush=body.get("flush_cache", True))

        if body.get("abort_all_requests"):
            await asyncio.wrap_future(core.ask(core.abort_all))
        try:
            await asyncio.wrap_future(core.ask_when_idle(work))
        except GyreError as error:
            return _json({"success": False, "message": str(error)}, 400)
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _update_version(self, request: Request) -> Response:
        body = await _fields(request)
        version = body.get("new_version")
        if version is None:
            raise BadCallError("update_weight_version needs new_version")
        core = self._engine.core

        def work() -> None:
            if body.get("abort_all_requests", True):
                core.abort_all()
            core.new_version(str(version), flush=False)

        await asyncio.wrap_future(core.ask(work))
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": str(version)})

    async def _checksum(self, request: Request) -> Response:
        if (await _fields(request)).get("action") != "checksum":
            raise BadCallError("weights_checker knows the action checksum")
        total = await asyncio.wrap_future(self._engine.core.ask(self._engine.checksum))
        return _json({"success": True, "ranks": [{"rank": 0, "per_gpu_checksum": total}]})

    async def _release(self, request: Request) -> Response:
        """The weights are the trainer's own, and stay; the KV goes, and like SGLang we insist on being idle."""
        core = self._engine.core
        if not await asyncio.wrap_future(core.ask(core.flush)):
            raise BadCallError("release_memory_occupation needs an idle engine: pause it with mode abort first")
        return _json({})

    async def _resume(self, request: Request) -> Response:
        return _json({})


class _Stream(StreamingResponse):
    """Server-sent events. The generator is closed at once when the client goes, so its call is aborted at once."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _read_body(raw: bytes) -> GenerateBody:
    try:
        body = _generate_body(raw)
        params = msgspec.json.decode(raw).get("sampling_params") or {}
    except msgspec.MsgspecError as error:
        raise BadCallError(f"not a request that this engine takes: {error}") from error
    for name in REFUSED:
        if params.get(name):
            raise BadCallError(f"sampling_params.{name} is not served by the embedded engine")
    for name, neutral in NEUTRAL.items():
        if params.get(name, neutral) not in (neutral, None):
            raise BadCallError(f"sampling_params.{name} other than {neutral} is not served by the embedded engine")
    return body


async def _fields(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        data = msgspec.json.decode(raw) if raw.strip() else {}
    except msgspec.DecodeError as error:
        raise BadCallError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadCallError("the body is not a JSON object")
    return data


def _json(data: Any, status: int = 200) -> Response:
    return Response(encode(data), status, media_type="application/json")


def _error(message: str, status: int) -> Response:
    return _json({"error": {"message": message, "code": status}}, status)


def _guarded(call: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        try:
            return await call(request)
        except EngineError as error:
            return _error(str(error), error.status or 500)

    return guarded
