"""The gateway: one ASGI app in front of all harnesses of a run. Border 1 of the architecture."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.dialects.base import Dialect, Incoming, Problem, problem_of
from gyre_sdk.capture.dialects.chat import ChatDialect
from gyre_sdk.capture.dialects.gemini import GeminiDialect
from gyre_sdk.capture.dialects.messages import MessagesDialect
from gyre_sdk.capture.dialects.responses import ResponsesDialect
from gyre_sdk.capture.gateway_metrics import GatewayMetrics
from gyre_sdk.capture.memory import give_back_for_ever
from gyre_sdk.capture.model import ChatRenderer
from gyre_sdk.capture.rates import Bucket
from gyre_sdk.capture.recorder import Recorder
from gyre_sdk.capture.recovery import Recovery
from gyre_sdk.capture.respond import Client, StreamBrokenError, answer, send_problem
from gyre_sdk.capture.serving import Tls, serve_app
from gyre_sdk.capture.wal import Flusher, Wal, read_records
from gyre_sdk.errors import (
    ConfigError,
    CorruptRecordError,
    GraphError,
    GyreError,
    RequestError,
    SealedError,
    UnauthorizedError,
)
from gyre_sdk.graph import BranchGraph
from gyre_sdk.sampling import ModelInfo, TokenClient
from gyre_sdk.wire.records import Opened, Outcome, Record, Sealed

log = logging.getLogger("gyre.gateway")
Renderer = ChatRenderer
_EXECUTION = re.compile(r"[0-9a-f]{12}")
TOKEN_META = "token_sha256"
"""Key of `Opened.meta` under which the token's hash is kept, never the token."""
SEALED_KEPT = 4096
"""How many ended executions are remembered, to answer their late calls with 410 instead of 401."""


class RecordSink(Protocol):
    """Told of every execution's WAL as it is opened; a stream to the backend tails it from there."""

    def opened(self, execution: str, wal: Wal) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecutionHandle:
    """An open execution, as its owner sees it."""

    execution: str
    token: str
    """The harness's API key; empty for a recovered execution, whose harness has it."""
    recorder: Recorder
    gateway: Gateway

    @property
    def base_url(self) -> str:
        """Where the harness finds the gateway, without `/v1`; empty while it is not being served."""
        return self.gateway.base_url

    @property
    def graph(self) -> BranchGraph:
        """The branch graph so far; read only."""
        return self.recorder.graph


class Gateway:
    """Records every call of every execution, and serves them from one engine client.

    client: where tokens come from. renderer: the model's template. run_dir: `executions/<id>/wal.gyre` go there.
    """

    def __init__(
        self,
        client: TokenClient,
        renderer: Renderer,
        run_dir: Path,
        config: GatewayConfig | None = None,
        sink: RecordSink | None = None,
    ) -> None:
        self.client = client
        self.renderer = renderer
        self.run_dir = run_dir
        self.config = config or GatewayConfig()
        self.sink = sink
        self.base_url = ""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._flusher = Flusher(run_dir / "journal.gyre")
        self._info: ModelInfo | None = None
        self._chat = ChatDialect()
        self._messages = MessagesDialect()
        self._responses = ResponsesDialect()
        self._gemini = GeminiDialect()
        self._by_token: dict[bytes, tuple[bytes, Recorder]] = {}
        self._recorders: dict[str, Recorder] = {}
        self._tokens: dict[str, bytes] = {}
        self._ended: dict[bytes, str] = {}
        self._buckets: dict[str, Bucket] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._metrics = GatewayMetrics()
        self.damaged: dict[str, str] = {}
        """Executions whose log `recover` could not go on with, and why."""

    # -- executions --------------------------------------------------------------------------------------------

    async def open(self, spec: ExecutionSpec, token: str = "") -> ExecutionHandle:
        """Begin an execution. Raises ConfigError for a bad or used id, StorageError, EngineError.

        token: its API key, at least 16 characters; a random one when empty. Who asks again with the same id and token
        (because the answer was lost) gets the same execution.
        """
        execution = spec.execution or secrets.token_hex(6)
        if not _EXECUTION.fullmatch(execution):
            raise ConfigError(f"execution id {execution!r}: expected 12 lower-case hex digits")
        if token and len(token) < 16:
            raise ConfigError("an execution's token has at least 16 characters")
        known = self._recorders.get(execution)
        if known is not None and token and hmac.compare_digest(self._tokens[execution], _token_key(token)):
            return ExecutionHandle(execution, token, known, self)
        if execution in self._recorders or execution in self._outcomes:
            raise ConfigError(f"execution {execution} was opened already")
        info = await self.model_info()
        token = token or secrets.token_urlsafe(32)
        wal = Wal.create(self.wal_path(execution), self._flusher)
        graph = BranchGraph()
        recorder = self._recorder(execution, wal, graph, info, spec)
        opened = Opened(
            execution=execution,
            at=time.time(),
            group=spec.group,
            task=spec.task,
            harness=spec.harness,
            model=info.model,
            deadline_s=spec.deadline_s,
            meta={**spec.meta, TOKEN_META: _token_key(token).hex()},
        )
        await recorder.durable(recorder.write(opened))
        self._enter(execution, _token_key(token), recorder, wal)
        return ExecutionHandle(execution, token, recorder, self)

    def _recorder(self, execution: str, wal: Wal, graph: BranchGraph, info: ModelInfo, spec: ExecutionSpec) -> Recorder:
        limits = spec.limits or self.config.limits
        return Recorder(execution, wal, graph, self.renderer, self.client, info, self.config, limits)

    async def recover(self) -> list[ExecutionHandle]:
        """Go on with the executions of an earlier gateway on this run folder that were not sealed.

        To be called before `serving`, so that no harness finds its key unknown; serve on the same port as before.

        Their harnesses keep their tokens; the retry of a call that was running goes on from the tokens that are on disk,
        and a finished reply that was not delivered whole is given to its retry. An execution whose log is damaged is
        refused to its harness and listed in `damaged`; the others go on. Raises ConfigError when another process still
        writes a log, StorageError.
        """
        info = await self.model_info()
        handles: list[ExecutionHandle] = []
        for path in sorted(self.run_dir.glob("executions/*/wal.gyre")):
            execution = path.parent.name
            if not _EXECUTION.fullmatch(execution) or execution in self._recorders:
                continue
            try:
                handle = await self._recover(execution, path, info)
            except (CorruptRecordError, GraphError) as error:
                log.error("execution %s can't go on: %s", execution, error)
                self.damaged[execution] = str(error)
                self._lose(execution, path)
                continue
            if handle is not None:
                handles.append(handle)
        return handles

    def _lose(self, execution: str, path: Path) -> None:
        """Remember whose key it was, so that its harness is told."""
        with contextlib.suppress(CorruptRecordError, OSError):
            first = next(read_records(path), None)
            if isinstance(first, Opened):
                self._ended[bytes.fromhex(first.meta.get(TOKEN_META, ""))] = execution

    async def _recover(self, execution: str, path: Path, info: ModelInfo) -> ExecutionHandle | None:
        records = await asyncio.to_thread(lambda: list(read_records(path)))
        if not records or not isinstance(records[0], Opened):
            return None
        opened = records[0]
        key = bytes.fromhex(opened.meta.get(TOKEN_META, ""))
        if isinstance(records[-1], Sealed):
            self._outcomes[execution] = records[-1].outcome
            self._ended[key] = execution
            return None
        wal, report = Wal.open(path, self._flusher)
        if not report.ok:
            log.warning("execution %s: %s", execution, report)
        graph = await asyncio.to_thread(BranchGraph.replay, records)
        recorder = self._recorder(execution, wal, graph, info, ExecutionSpec(execution=execution))
        interrupted = Recovery(recorder).run(records)
        recorder.note("recovered", interrupted=len(interrupted), torn_bytes=report.torn_bytes)
        self._enter(execution, key, recorder, wal)
        return ExecutionHandle(execution, "", recorder, self)

    def _enter(self, execution: str, key: bytes, recorder: Recorder, wal: Wal) -> None:
        self._by_token[key] = (key, recorder)
        self._tokens[execution] = key
        self._recorders[execution] = recorder
        if self.sink is not None:
            self.sink.opened(execution, wal)

    async def seal(self, execution: str, outcome: Outcome) -> None:
        """End an execution: late calls are cancelled, the outcome is attached once. Idempotent for an equal outcome."""
        recorder = self._recorders.get(execution)
        if recorder is None:
            if execution in self.damaged:
                log.error("execution %s: its outcome %r is not recorded, its log is damaged", execution, outcome.status)
                return
            if execution not in self._outcomes:
                raise ConfigError(f"execution {execution} is not open here")
            if self._outcomes[execution] != outcome:
                raise ConfigError(f"execution {execution} is sealed already, with another outcome")
            return
        key = self._tokens[execution]
        await recorder.seal(outcome)
        self._metrics.ended(recorder.counters, outcome)
        self._recorders.pop(execution, None)
        self._tokens.pop(execution, None)
        self._buckets.pop(execution, None)
        self._by_token.pop(key, None)
        self._outcomes[execution] = outcome
        self._ended[key] = execution
        while len(self._ended) > SEALED_KEPT:
            self._ended.pop(next(iter(self._ended)))

    def executions(self) -> Mapping[str, Recorder]:
        """Open executions."""
        return dict(self._recorders)

    def wal_path(self, execution: str) -> Path:
        """Where an execution's log lies."""
        return self.run_dir / "executions" / execution / "wal.gyre"

    async def model_info(self) -> ModelInfo:
        """The engine's model, asked once. Raises ConfigError when it does not fit the tokenizer."""
        if self._info is None:
            info = await self.client.model_info()
            if info.vocab_size and info.vocab_size < max(self.renderer.stop_ids):
                raise ConfigError(
                    f"the engine's vocabulary ({info.vocab_size}) is smaller than the tokenizer's: another model's?"
                )
            self._info = info
        return self._info

    async def aclose(self) -> None:
        """Stop running calls and write what is queued. Executions stay open: another gateway can go on with them."""
        for recorder in self._recorders.values():
            await recorder.close()
        self._recorders.clear()
        self._by_token.clear()
        await asyncio.to_thread(self._flusher.close)

    # -- HTTP --------------------------------------------------------------------------------------------------

    def app(self) -> Starlette:
        """The ASGI app."""
        gemini = ("/v1beta/models/{target:path}", "/v1/models/{target:path}", "/models/{target:path}")
        routes = [
            *self._post(("/chat/completions", "/v1/chat/completions"), self._chat),
            *self._post(("/messages", "/v1/messages"), self._messages),
            *self._post(("/messages/count_tokens", "/v1/messages/count_tokens"), self._messages),
            *self._post(("/responses", "/v1/responses"), self._responses),
            *self._post(gemini, self._gemini),
            *(Route(path, self._models, methods=["GET"]) for path in ("/models", "/v1/models", "/v1beta/models")),
            Route("/", self._alive, methods=["GET", "HEAD"]),
            Route("/healthz", self._alive, methods=["GET", "HEAD"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]
        return Starlette(routes=routes)

    def _post(self, paths: tuple[str, ...], dialect: Dialect) -> list[Route]:
        return [Route(path, _Endpoint(self, dialect), methods=["POST"]) for path in paths]

    async def _alive(self, request: Request) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"status": "ok", "executions": len(self._recorders)})

    async def _show_metrics(self, request: Request) -> Any:
        return self._metrics.answer(request, self.config.metrics_token, self._recorders)

    async def _models(self, request: Request) -> Any:
        from starlette.responses import JSONResponse

        dialect = self._models_dialect(request)
        try:
            self.authenticate(request.headers, request.query_params)
        except RequestError as error:
            return JSONResponse(dialect.error(problem_of(error, 1.0)), status_code=error.status)
        return JSONResponse(dialect.models(self.config.model))

    def _models_dialect(self, request: Request) -> Dialect:
        """The list of models has one path and several forms; what else the request says tells them apart."""
        if "anthropic-version" in request.headers:
            return self._messages
        if request.url.path.startswith("/v1beta"):
            return self._gemini
        return self._responses if "client_version" in request.query_params else self._chat

    def authenticate(self, headers: Mapping[str, str], query: Mapping[str, str]) -> Recorder:
        """The execution a request belongs to. Raises UnauthorizedError, SealedError or RateLimitedError."""
        token = token_of(headers, query)
        if not token:
            self._rate("")
            raise UnauthorizedError("no API key: the key is the execution's token", code="invalid_api_key")
        key = _token_key(token)
        entry = self._by_token.get(key)
        if entry is not None and hmac.compare_digest(entry[0], key):
            self._rate(entry[1].execution)
            return entry[1]
        self._rate("")
        lost = self.damaged.get(self._ended.get(key, ""))
        if lost is not None:
            raise SealedError(f"this execution's log is damaged, it can't go on: {lost}", code="damaged")
        if key in self._ended:
            raise SealedError(f"execution {self._ended[key]} has ended; nothing more is recorded for it", code="sealed")
        raise UnauthorizedError("this API key names no execution", code="invalid_api_key")

    def _rate(self, execution: str) -> None:
        bucket = self._buckets.get(execution)
        if bucket is None:
            bucket = self._buckets[execution] = Bucket(self.config.requests_per_s, self.config.request_burst)
        bucket.take(f"execution {execution}" if execution else "requests without a valid API key")

    @asynccontextmanager
    async def serving(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: Tls | None = None,
        listener: socket.socket | None = None,
        routes: Sequence[BaseRoute] = (),
    ) -> AsyncIterator[str]:
        """Serve on an address; yields the base URL (without /v1). Without TLS only on loopback: tokens travel in the clear.

        listener: a listening socket to be used instead of host and port. routes: served beside the gateway's own.
        Raises ConfigError when the port is taken, the address is no loopback one, or the certificate can't be read.
        """
        app = self.app()
        app.router.routes.extend(routes)
        async with serve_app(app, host, port, tls=tls, listener=listener) as url:
            self.base_url = url
            memory = asyncio.create_task(give_back_for_ever(), name="gyre-memory")
            try:
                yield url
            finally:
                memory.cancel()
                # Running calls are told before their connections are closed.
                for recorder in self._recorders.values():
                    await recorder.stop()
        self.base_url = ""
        await self.aclose()


class _Endpoint:
    """An ASGI endpoint: raw, since it must know when the client is gone and must be able to break a stream."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self.gateway = gateway
        self.dialect = dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        client = Client(receive, send)
        config = self.gateway.config
        try:
            recorder = self.gateway.authenticate(request.headers, request.query_params)
            body = await client.body(config.max_body_bytes)
            incoming = Incoming(body, request.headers, request.url.path, request.query_params, request.path_params)
            model_request = self.dialect.parse(incoming)
            if self.dialect.counts(incoming):
                await client.json(200, self.dialect.count(await recorder.count(model_request)))
                return
            call = await recorder.start(model_request)
            await answer(client, self.dialect, model_request, recorder, call)
        except GyreError as error:
            if not client.started and not client.gone:
                await send_problem(client, self.dialect, problem_of(error, config.retry_after_s))
        except StreamBrokenError:
            log.info("a stream was cut after its error event")
        except Exception:  # boundary: a bug of ours is answered in the dialect's shape, and logged
            log.exception("unexpected error while serving %s", request.url.path)
            if not client.started:
                await send_problem(client, self.dialect, Problem(500, "internal error", "server"))
        finally:
            client.close()


def token_of(headers: Mapping[str, str], query: Mapping[str, str]) -> str:
    """The API key of a request, wherever its dialect puts it."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key") or ""


def _token_key(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


__all__ = ["ExecutionHandle", "ExecutionSpec", "Gateway", "GatewayConfig", "Record", "RecordSink"]
