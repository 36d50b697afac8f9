"""The service's HTTP: registration, orders, frames, status, metrics, and the router's front."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gyre_backend.ingest import Ingest, ingest_routes
from gyre_backend.service.driver import Driver
from gyre_backend.service.routing import Routing
from gyre_sdk.errors import ConfigError
from gyre_sdk.wire.prometheus import CONTENT_TYPE


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    runner: str
    tasks: list[str]
    slots: int
    harness: str


@dataclass(slots=True)
class Current:
    """The driver of the moment: a rollback replaces it, the HTTP side stays."""

    driver: Driver | None = None

    def get(self) -> Driver:
        """The driver. Raises ConfigError while there is none."""
        if self.driver is None:
            raise ConfigError("the service is starting")
        return self.driver


class ServiceApp:
    """Routes over the current driver. Everything but the router's front wants the admin token."""

    def __init__(self, current: Current, ingest: Ingest, routing: Routing, token: str) -> None:
        self._current = current
        self._ingest = ingest
        self._routing = routing
        self._token = token
        self.url = ""

    def app(self) -> Starlette:
        """The ASGI application."""
        routes: list[BaseRoute] = [
            Route("/v1/hello", self._guarded(self._hello), methods=["POST"]),
            Route("/v1/orders", self._guarded(self._orders), methods=["GET"]),
            Route("/v1/status", self._guarded(self._status), methods=["GET"]),
            *(Route(path, self._guarded(self._metrics), methods=["GET"]) for path in ("/v1/metrics", "/metrics")),
            *ingest_routes(self._ingest, authorize=self._refusal),
            *self._routing.routes(),
        ]
        return Starlette(routes=routes)

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return JSONResponse({"error": "the service wants its admin token (GYRE_ADMIN_TOKEN)"}, status_code=401)

    def _guarded(self, call: Any) -> Any:
        async def guarded(request: Request) -> Response:
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
            if self._current.driver is None:
                return JSONResponse({"error": "the service is starting"}, status_code=503)
            answer: Response = await call(request, self._current.driver)
            return answer

        return guarded

    async def _hello(self, request: Request, driver: Driver) -> Response:
        try:
            hello = msgspec.json.decode(await request.body(), type=_Hello)
            replaced = driver.run_state.orders.hello(hello.runner, hello.tasks, hello.slots, hello.harness)
        except (msgspec.MsgspecError, ConfigError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        if replaced:
            driver.runner_replaced()
        run = driver.run_state
        return JSONResponse(
            {
                "service": "gyre",
                "model": str(run.model_dir),
                "policy_version": run.version,
                "router_url": self.url,
                "group_size": run.config.train.group_size,
                "context": run.facts.context,
            }
        )

    async def _orders(self, request: Request, driver: Driver) -> Response:
        try:
            after = int(request.query_params.get("after", "-1"))
            wait = float(request.query_params.get("wait", "0"))
        except ValueError:
            return JSONResponse({"error": "after and wait are numbers"}, status_code=400)
        return JSONResponse({"orders": await driver.run_state.orders.after(after, wait)})

    async def _status(self, request: Request, driver: Driver) -> Response:
        return JSONResponse(driver.status())

    async def _metrics(self, request: Request, driver: Driver) -> Response:
        run, state = driver.run_state, driver.state
        gauges: dict[str, float] = {
            "policy_version": run.version,
            "executions_dispatched": state.dispatched,
            "executions_started": state.started,
            "executions_finished": state.finished,
            "waterlevel": state.waterlevel,
            "rollout_capacity": state.capacity,
            "ready_groups": len(state.ready),
            "cells_in_training": len(run.training),
            "cell_restarts": run.fleet.restarts,
            **{f"router_{name}": value for name, value in self._routing.counters().items()},
            **{f"ingest_{name}": value for name, value in _stats(self._ingest).items()},
        }
        return PlainTextResponse(run.metrics.prometheus(gauges), media_type=CONTENT_TYPE)


def _stats(ingest: Ingest) -> dict[str, int]:
    return {
        name: getattr(ingest.stats, name) for name in ("records", "duplicates", "bytes", "gaps", "refused", "sealed")
    }
