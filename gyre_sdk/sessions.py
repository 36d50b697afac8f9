"""Recording a harness that runs in this process.

    async with gyre_sdk.session(engine="http://127.0.0.1:30000", model="models/qwen3-4b") as s:
        client = AsyncOpenAI(base_url=s.base_url + "/v1", api_key=s.api_key)
        await client.chat.completions.create(..., extra_headers=s.headers())
        with s.fork():                       # a subagent
            await client.chat.completions.create(..., extra_headers=s.headers())
        s.finish(reward=1.0)

The scopes live in a ContextVar: tasks started inside one stay in it, whatever runs beside them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_sdk.errors import ConfigError
from gyre_sdk.wire.records import Outcome, Role, Status

if TYPE_CHECKING:
    import httpx

    from gyre_sdk.capture.config import GatewayConfig
    from gyre_sdk.capture.gateway import ExecutionHandle, Gateway
    from gyre_sdk.capture.model import ChatRenderer
    from gyre_sdk.graph import BranchGraph
    from gyre_sdk.sampling import TokenClient


@dataclass(frozen=True, slots=True)
class _Scope:
    id: str
    kind: str
    parent: str
    role: Role | None


_scope: ContextVar[_Scope | None] = ContextVar("gyre_scope", default=None)


class Session:
    """One execution, open. Made by `session`."""

    def __init__(self, handle: ExecutionHandle) -> None:
        self._handle = handle
        self._compacted: dict[str, str] = {}
        self.outcome: Outcome | None = None
        """What `finish` set; attached when the session ends."""

    @property
    def execution(self) -> str:
        """The execution's id: 12 hex digits."""
        return self._handle.execution

    @property
    def base_url(self) -> str:
        """The gateway, without `/v1`."""
        return self._handle.base_url

    @property
    def api_key(self) -> str:
        """The execution's secret, to be given to a client as its API key."""
        return self._handle.token

    @property
    def graph(self) -> BranchGraph:
        """The branch graph so far; read only."""
        return self._handle.graph

    def headers(self) -> dict[str, str]:
        """Headers that tell the gateway in which scope a request is made. Ask for them at each request."""
        scope = _scope.get()
        inside = scope.id if scope is not None else ""
        told: dict[str, str] = {}
        if scope is not None:
            told = {"id": scope.id, "kind": scope.kind, "parent": scope.parent}
            if scope.role is not None:
                told["role"] = scope.role
        if inside in self._compacted:
            told["after"] = self._compacted[inside]
        return {"x-gyre-scope": json.dumps(told)} if told else {}

    def http(self, **options: object) -> httpx.AsyncClient:
        """An httpx client on the gateway that sends key and scope by itself; close it like any other.

        options: as for `httpx.AsyncClient`.
        """
        import httpx

        async def add_scope(request: httpx.Request) -> None:
            request.headers.update(self.headers())

        settings: dict[str, object] = {
            "base_url": self.base_url,
            "headers": {"authorization": f"Bearer {self.api_key}"},
            "timeout": None,
            "event_hooks": {"request": [add_scope]},
            **options,
        }
        return httpx.AsyncClient(**settings)  # type: ignore[arg-type]

    @contextmanager
    def fork(self, role: Role | None = None) -> Iterator[None]:
        """Calls inside are a subagent's, asked for by the last call outside. `role` overrides `subagent`."""
        with self._inside("fork", role):
            yield

    @contextmanager
    def compact(self) -> Iterator[None]:
        """Calls inside write a summary; the next call outside is the shortened context."""
        with self._inside("compact", None) as scope:
            yield
        self._compacted[scope.parent] = scope.id

    @contextmanager
    def retry(self) -> Iterator[None]:
        """The first call inside is another try of the last call outside."""
        with self._inside("retry", None):
            yield

    @contextmanager
    def _inside(self, kind: str, role: Role | None) -> Iterator[_Scope]:
        outer = _scope.get()
        scope = _Scope(secrets.token_hex(4), kind, "" if outer is None else outer.id, role)
        token = _scope.set(scope)
        try:
            yield scope
        finally:
            _scope.reset(token)

    def finish(
        self,
        *,
        reward: float | None = None,
        status: Status = "completed",
        metrics: Mapping[str, float] | None = None,
        message: str = "",
    ) -> None:
        """Set the outcome. Without a reward the execution is not valid for training."""
        self.outcome = Outcome(
            status=status, reward=reward, valid=reward is not None, message=message, metrics=dict(metrics or {})
        )


@asynccontextmanager
async def session(
    *,
    engine: TokenClient | str | None = None,
    model: ChatRenderer | Path | str | None = None,
    gateway: Gateway | None = None,
    run_dir: Path | str = "runs/session",
    config: GatewayConfig | None = None,
    task: str = "",
    group: str = "",
    harness: str = "",
    meta: Mapping[str, str] | None = None,
) -> AsyncIterator[Session]:
    """Open an execution for a harness in this process; it is sealed at the end, whatever happens.

    Either `gateway` (being served already), or `engine` (a URL that speaks SGLang's `/generate`, or a TokenClient)
    with `model` (a model folder, or a renderer); then a gateway of its own records into `run_dir`.
    Raises ConfigError for a wrong combination, and what `Gateway.open` raises.
    """
    from gyre_sdk.capture.config import ExecutionSpec

    spec = ExecutionSpec(task=task, group=group, harness=harness, meta=dict(meta or {}))
    if gateway is not None:
        if not gateway.base_url:
            raise ConfigError("the gateway is not being served: enter `gateway.serving()` first")
        async with _recorded(gateway, spec) as opened:
            yield opened
        return
    if engine is None or model is None:
        raise ConfigError("session needs a gateway, or an engine and a model")
    async with _own_gateway(engine, model, Path(run_dir), config) as own, _recorded(own, spec) as opened:
        yield opened


@asynccontextmanager
async def _own_gateway(
    engine: TokenClient | str, model: ChatRenderer | Path | str, run_dir: Path, config: GatewayConfig | None
) -> AsyncIterator[Gateway]:
    from gyre_sdk.capture.gateway import Gateway
    from gyre_sdk.capture.renderer import load_renderer
    from gyre_sdk.sampling import SGLangClient

    renderer = load_renderer(model) if isinstance(model, str | Path) else model
    client = SGLangClient(engine) if isinstance(engine, str) else engine
    gateway = Gateway(client, renderer, run_dir, config)
    try:
        async with gateway.serving():
            yield gateway
    finally:
        if isinstance(client, SGLangClient):
            await client.aclose()


@asynccontextmanager
async def _recorded(gateway: Gateway, spec: object) -> AsyncIterator[Session]:
    handle = await gateway.open(spec)  # type: ignore[arg-type]
    opened = Session(handle)
    outcome = Outcome(status="cancelled", message="the session was cancelled")
    try:
        yield opened
        outcome = opened.outcome or Outcome(status="completed")
    except asyncio.CancelledError:
        raise
    except Exception as error:  # cleans up and raises again
        failed = Outcome(status="harness_error", failure="agent", message=f"{type(error).__name__}: {error}"[:500])
        outcome = opened.outcome or failed
        raise
    finally:
        await asyncio.shield(gateway.seal(handle.execution, outcome))


__all__ = ["Session", "session"]
