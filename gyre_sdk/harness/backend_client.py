"""The runner's side of the border to a training backend: hello, orders, status. Frames go by `gyre_sdk.stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx
import msgspec
import stamina

from gyre_sdk.errors import ConfigError, EngineGoneError

ORDER_WAIT_S = 20.0


class Hello(msgspec.Struct, frozen=True):
    """What the service answers to a runner that registers."""

    service: str
    model: str
    policy_version: int
    router_url: str


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered order of the service."""

    order: int
    kind: str
    group: str = ""
    task: str = ""
    executions: list[str] = []
    execution: str = ""
    reason: str = ""
    purpose: str = "train"


class _Orders(msgspec.Struct, frozen=True):
    orders: list[Order]


class BackendClient:
    """Talks to a service. Survives its restarts: every call is retried until the service is back or `patience_s` is over."""

    def __init__(self, url: str, token: str, *, patience_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(30.0, read=ORDER_WAIT_S + 30.0),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def hello(self, runner: str, tasks: list[str], slots: int, harness: str) -> Hello:
        """Register. Raises ConfigError when the service refuses, EngineGoneError when it can't be reached."""
        body = {"runner": runner, "tasks": tasks, "slots": slots, "harness": harness}
        return msgspec.json.decode((await self._call("POST", "/v1/hello", json=body)).content, type=Hello)

    async def orders(self) -> AsyncIterator[Order]:
        """Orders as they come, each once, until the service says stop (which is yielded too)."""
        after = -1
        while True:
            answer = await self._call("GET", "/v1/orders", params={"after": after, "wait": ORDER_WAIT_S})
            for order in msgspec.json.decode(answer.content, type=_Orders).orders:
                if order.order <= after:
                    continue
                after = order.order
                yield order
                if order.kind == "stop":
                    return

    async def status(self) -> dict[str, object]:
        """The service's own account of itself, for live progress."""
        answer = await self._call("GET", "/v1/status")
        return msgspec.json.decode(answer.content, type=dict[str, object])

    async def _call(self, method: str, path: str, **arguments: object) -> httpx.Response:
        async for attempt in stamina.retry_context(
            on=(httpx.TransportError, _Unavailable), attempts=None, timeout=self.patience_s, wait_max=5.0
        ):
            with attempt:
                answer = await self._http.request(method, path, **arguments)  # type: ignore[arg-type]
                if answer.status_code in (502, 503, 504):
                    raise _Unavailable(answer.status_code)
        if answer.status_code >= 400:
            raise ConfigError(f"the backend refused {method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer


class _Unavailable(Exception):
    """The service is starting or restarting."""


async def wait_until_ready(url: str, timeout_s: float) -> None:
    """Poll `url`/health until it answers. Raises EngineGoneError after `timeout_s`."""
    with anyio.move_on_after(timeout_s):
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                try:
                    if (await http.get(f"{url}/health", timeout=5.0)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await anyio.sleep(0.2)
    raise EngineGoneError(f"{url} did not come up within {timeout_s:g} s")
