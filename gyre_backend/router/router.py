"""The router: knows the engines, gives every call a place, moves calls away from an engine that is to leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from gyre_backend.router.migrate import KVMigrator, make_migrator
from gyre_backend.router.placement import EngineState, Placement
from gyre_backend.router.relay import Refused, Relay
from gyre_backend.router.upstream import Upstream

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Limits of the router. Seconds."""

    max_waiting: int = 4096
    """Calls that may wait for a place; one more is answered 429."""
    queue_s: float = 1800.0
    """Longest wait of a new call for a place, then 429. A call that has begun is never dropped for waiting."""
    retry_after_s: float = 5.0
    slots: int | None = None
    """Calls per engine at a time; None: what the engine says (max_running_requests)."""
    retries: int = 8
    """Attempts in a row that add no token, over all engines, before a call fails."""
    reserve_s: float = 5.0
    """Longest wait for a place elsewhere before a call is taken off an engine that leaves."""
    abort_s: float = 10.0
    """Longest wait for an engine's answer to an abort; then we hang up."""
    probe_s: float = 1.0
    """Between two looks at an engine that failed a call."""
    migrator: str = "prefill"


class Router:
    """Implements the service's `Routing`: engines (cells) come and go by name, clients see one SGLang server."""

    def __init__(self, config: RouterConfig | None = None, *, http: httpx.AsyncClient | None = None) -> None:
        self.config = config or RouterConfig()
        self.http = http or httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self.upstream = Upstream()
        self.migrator: KVMigrator = make_migrator(self.config.migrator, self.http)
        self.relays: dict[str, Relay] = {}
        self.info: dict[str, Any] = {}
        """The last `/model_info` of an engine: it answers while all are away."""
        self._placement = Placement()
        self._waiting: deque[tuple[Relay, Sequence[int], bool, asyncio.Future[EngineState]]] = deque()
        self._counters: dict[str, float] = dict.fromkeys(
            (
                "requests", "moves", "resumes", "failures", "refused", "recomputed_tokens", "migrated_tokens",
                "migrations", "migrated_bytes", "migrate_seconds", "wait_seconds", "drain_seconds",
            ),
            0.0,
        )  # fmt: skip
        self._probes: dict[str, asyncio.Task[None]] = {}

    # ---- the service's side ----

    def routes(self) -> list[BaseRoute]:
        """SGLang's contract, to be mounted."""
        from gyre_backend.router.routes import RouterRoutes

        return RouterRoutes(self).routes()

    def app(self) -> Starlette:
        """The routes as an application."""
        from starlette.applications import Starlette

        return Starlette(routes=self.routes())

    @property
    def engines(self) -> Mapping[str, EngineState]:
        """By name."""
        return self._placement.engines

    async def add(self, cell: str, url: str, version: int | str = "", *, stay: float | None = None) -> None:
        """Give this engine calls from now on; also one that was here before, at the same or another URL.

        `stay`: seconds it is expected to remain; without it, engines are taken to leave in order of their number.
        """
        url = url.rstrip("/")
        self._forget(cell)
        slots = self.config.slots or await self._slots(url)
        self._placement.engines[cell] = EngineState(cell, url, slots, version=str(version))
        if stay is not None:
            self._placement.stay[cell] = stay
        self._serve_waiting()

    async def drain(self, cell: str) -> int:
        """Send it nothing more, and move what runs there elsewhere; returns how many calls were moved.

        Per call: a place elsewhere is reserved while it still runs, then it is aborted and goes on there from its partial reply.
        With no other engine open, calls wait for the next one.
        """
        engine = self._placement.engines.get(cell)
        if engine is None:
            return 0
        began = time.monotonic()
        engine.draining = True
        relays = [relay for relay in engine.calls if relay.engine is engine]
        for relay in engine.calls - set(relays):
            relay.target = None  # it was only reserved here
            engine.calls.discard(relay)
        await asyncio.gather(*(self._move(relay, engine) for relay in relays))
        self._placement.engines.pop(cell, None)
        self._counters["moves"] += len(relays)
        self._counters["drain_seconds"] += time.monotonic() - began
        return len(relays)

    async def remove(self, name: str) -> int:
        """Drain, and forget how long it was expected to stay."""
        moved = await self.drain(name)
        self._placement.stay.pop(name, None)
        return moved

    def lost(self, cell: str) -> None:
        """The engine is gone: what ran there goes on elsewhere with what had arrived."""
        self._forget(cell)

    def published(self, version: int | str) -> None:
        """Every engine that is open serves this version now."""
        for engine in self._placement.engines.values():
            if engine.open:
                engine.version = str(version)
        if self.info:
            self.info["weight_version"] = str(version)

    def expect(self, stay: Mapping[str, float]) -> None:
        """How long each engine will probably stay in rollout, seconds: moved calls go where that is longest."""
        self._placement.stay.update(stay)

    def counters(self) -> Mapping[str, float]:
        """Since the start, and what is live now."""
        live = {"live": float(len(self.relays)), "waiting": float(len(self._waiting))}
        return {**self._counters, **live, "engines": float(len(self._placement.engines))}

    async def aclose(self) -> None:
        """Hang up on everything."""
        for probe in self._probes.values():
            probe.cancel()
        for name in list(self._placement.engines):
            self._forget(name)
        await self.upstream.aclose()
        await self.http.aclose()

    # ---- the relays' side ----

    def open_relay(self, rid: str, body: dict[str, Any]) -> Relay:
        """A call comes in. Raises Refused for a rid that is live."""
        if rid in self.relays:
            raise Refused(400, f"Duplicate request ID detected: {rid}")
        relay = self.relays[rid] = Relay(self, rid, body)
        self._counters["requests"] += 1
        return relay

    def place_now(self, relay: Relay, ids: Sequence[int], *, moved: bool) -> EngineState | None:
        """A place on an engine, if there is one now. Calls that have begun go first."""
        if self._waiting and not moved:
            return None
        engine = self._placement.choose(relay.session, ids, moved=moved)
        if engine is not None:
            self._reserve(relay, ids, engine)
        return engine

    async def place(self, relay: Relay, ids: Sequence[int], *, moved: bool) -> EngineState:
        """A place on an engine, now or when one is free. Raises Refused (429)."""
        engine = self.place_now(relay, ids, moved=moved)
        if engine is not None:
            return engine
        if not moved and len(self._waiting) >= self.config.max_waiting:
            self._counters["refused"] += 1
            raise Refused(429, f"{len(self._waiting)} calls are waiting already", self.config.retry_after_s)
        future: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        entry = (relay, ids, moved, future)
        if moved:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        began = time.monotonic()
        try:
            return await asyncio.wait_for(future, None if moved else self.config.queue_s)
        except TimeoutError:
            self._counters["refused"] += 1
            message = f"no engine had a place within {self.config.queue_s:g} s"
            raise Refused(429, message, self.config.retry_after_s) from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.unreserve(relay, future.result())
            raise
        finally:
            self._counters["wait_seconds"] += time.monotonic() - began
            with contextlib.suppress(ValueError):
                self._waiting.remove(entry)

    def unreserve(self, relay: Relay, engine: EngineState) -> None:
        """The relay's place is free."""
        engine.calls.discard(relay)
        self._serve_waiting()

    def release(self, relay: Relay) -> None:
        """The relay is over."""
        self._counters["recomputed_tokens"] += relay.joined.recomputed_tokens
        if self.relays.get(relay.rid) is relay:
            del self.relays[relay.rid]
        for engine in self._placement.engines.values():
            engine.calls.discard(relay)
        self._serve_waiting()

    def failed(self, engine: EngineState, why: str) -> None:
        """It failed a call: nothing more goes there until it says that it is ready."""
        self._counters["failures"] += 1
        self._counters["resumes"] += 1
        known = self._placement.engines.get(engine.name) is engine
        if known and not engine.suspect:
            _log.warning("engine %s failed a call: %s", engine.name, why)
            engine.suspect = True
            self._probes[engine.name] = asyncio.create_task(self._probe(engine))

    async def post_abort(self, engine: EngineState, rid: str) -> None:
        """Ask an engine to end a call; one that can't be reached has nothing to end."""
        with contextlib.suppress(httpx.TransportError):
            await self.http.post(f"{engine.url}/abort_request", json={"rid": rid}, timeout=self.config.abort_s)

    async def migrate(self, source: EngineState, target: EngineState, ids: list[int], body: dict[str, Any]) -> None:
        """Let keys and values go over, when the configuration says so."""
        began = time.monotonic()
        moved = await self.migrator.move(source.url, target.url, ids, body)
        if moved.tokens:
            self._counters["migrations"] += 1
            self._counters["migrated_tokens"] += moved.tokens
            self._counters["migrated_bytes"] += moved.nbytes
            self._counters["migrate_seconds"] += time.monotonic() - began

    # ---- inside ----

    def _reserve(self, relay: Relay, ids: Sequence[int], engine: EngineState) -> None:
        engine.calls.add(relay)
        self._placement.settled(relay.session, ids, engine)

    def _serve_waiting(self) -> None:
        while self._waiting:
            relay, ids, moved, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            engine = self._placement.choose(relay.session, ids, moved=moved)
            if engine is None:
                return
            self._waiting.popleft()
            self._reserve(relay, ids, engine)
            future.set_result(engine)

    async def _move(self, relay: Relay, engine: EngineState) -> None:
        if self._placement.others_open(engine.name):
            with contextlib.suppress(TimeoutError, Refused):
                place = self.place(relay, relay.prompt, moved=True)
                target = await asyncio.wait_for(place, self.config.reserve_s)
                if relay.engine is engine and self.relays.get(relay.rid) is relay:
                    relay.target = target
                else:  # it has ended, or gone elsewhere by itself
                    self.unreserve(relay, target)
        if relay.engine is not engine:
            return
        relay.moving = True
        await relay.stop_attempt()
        try:
            await asyncio.wait_for(relay.left.wait(), self.config.abort_s)
        except TimeoutError:
            relay.cut()
            await relay.left.wait()

    def _forget(self, name: str) -> None:
        engine = self._placement.engines.pop(name, None)
        probe = self._probes.pop(name, None)
        if probe is not None:
            probe.cancel()
        if engine is None:
            return
        engine.draining = True
        for relay in list(engine.calls):
            if relay.engine is engine:
                self._counters["resumes"] += 1
                relay.cut()

    async def _probe(self, engine: EngineState) -> None:
        while True:
            await asyncio.sleep(self.config.probe_s)
            with contextlib.suppress(httpx.TransportError):
                if (await self.http.get(f"{engine.url}/ready", timeout=5.0)).status_code == 200:
                    break
        engine.suspect = False
        self._probes.pop(engine.name, None)
        self._serve_waiting()

    async def _slots(self, url: str) -> int:
        """What the engine runs at a time; also keeps its model info."""
        try:
            self.info = (await self.http.get(f"{url}/model_info", timeout=10.0)).json()
            server = (await self.http.get(f"{url}/server_info", timeout=10.0)).json()
            for key in ("context_length", "vocab_size"):
                if key not in self.info and server.get(key):
                    self.info[key] = server[key]
            return max(1, int(server.get("max_running_requests") or 16))
        except (httpx.HTTPError, ValueError) as error:
            _log.warning("%s does not say how much it takes (%s): 16 calls at a time", url, error)
            return 16
