"""The viewer's server: one static page, JSON for it, and a stream of what changes. Everything is read-only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.resources
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from gyre_sdk.errors import ConfigError
from gyre_sdk.viewer.executions import Executions, ExecutionView
from gyre_sdk.viewer.guard import Guard
from gyre_sdk.viewer.runs import RunData, read_json
from gyre_sdk.viewer.texts import TokenTexts
from gyre_sdk.viewer.training import Trained

POLL_S = 1.0
"""How often a page that is open makes us look at the run's folder."""
MAX_QUERY = 200
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


class Viewer:
    """Answers for one run's folder."""

    def __init__(self, run_dir: Path, *, model_dir: Path | None = None, poll_s: float = POLL_S) -> None:
        self.run = RunData(run_dir)
        self.texts = TokenTexts(model_dir or model_of(run_dir))
        self.executions = Executions(self.texts)
        self._poll_s = poll_s

    def app(self, *, token: str | None = None, hosts: frozenset[str] | None = LOCAL) -> ASGIApp:
        """The ASGI app. Without `hosts` any Host header is taken: only behind a token."""
        # What the first page asks for is read while the browser starts.
        threading.Thread(target=self._read_ahead, daemon=True).start()
        static = Path(str(importlib.resources.files("gyre_sdk.viewer") / "static"))
        inner = Starlette(
            routes=[
                Route("/", self._index),
                Route("/api/run", self._run),
                Route("/api/events", self._events),
                Route("/api/executions/{execution}/graph", self._graph),
                Route("/api/executions/{execution}/search", self._search),
                Route("/api/executions/{execution}/box/{box}", self._box),
                Route("/api/executions/{execution}/box/{box}/diff", self._diff),
                Route("/api/executions/{execution}/box/{box}/{what}", self._text),
                Mount("/static", StaticFiles(directory=static)),
            ],
            exception_handlers={ConfigError: _unknown},
        )
        self._page = (static / "index.html").read_bytes()
        return Guard(inner, token=token, hosts=hosts)

    def _read_ahead(self) -> None:
        with contextlib.suppress(OSError):  # the page will say it
            self.run.update()

    # -- pages

    async def _index(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8")

    async def _run(self, request: Request) -> Response:
        def work() -> bytes:
            self.run.update()
            return msgspec.json.encode(self.run.page())

        return _json(await anyio.to_thread.run_sync(work))

    async def _graph(self, request: Request) -> Response:
        opened, reveal = _names(request, "open"), _names(request, "show")
        return await self._answer(request, lambda view, trained: view.page(opened, trained, reveal))

    async def _search(self, request: Request) -> Response:
        query, opened = request.query_params.get("q", "")[:MAX_QUERY], _names(request, "open")
        return await self._answer(request, lambda view, trained: view.search(query, opened))

    async def _box(self, request: Request) -> Response:
        box, start = request.path_params["box"], _start(request)
        return await self._answer(request, lambda view, trained: view.box(box, trained, start))

    async def _text(self, request: Request) -> Response:
        box, what, start = request.path_params["box"], request.path_params["what"], _start(request)
        return await self._answer(request, lambda view, trained: view.text(box, what, start))

    async def _diff(self, request: Request) -> Response:
        box = request.path_params["box"]
        return await self._answer(request, lambda view, trained: view.diff(box))

    async def _answer(self, request: Request, ask: Callable[[ExecutionView, Trained], Mapping[str, Any]]) -> Response:
        execution = request.path_params["execution"]
        log = self.run.log(execution)
        if log is None:
            raise ConfigError(f"there is no execution {execution[:80]!r} in this run")

        def work() -> bytes:
            self.run.update()
            view = self.executions.view(log)
            view.update()
            return msgspec.json.encode(ask(view, self.run.trained(execution)))

        return _json(await anyio.to_thread.run_sync(work))

    # -- live

    async def _events(self, request: Request) -> Response:
        stamp, steps = _number(request, "stamp"), _number(request, "steps")
        return EventSourceResponse(self._changes(stamp, steps), ping=15)

    async def _changes(self, stamp: int, steps: int) -> AsyncIterator[ServerSentEvent]:
        """What changed after `stamp`, whenever something did; at first, that we are here."""
        yield ServerSentEvent("{}", event="hello")
        while True:
            now = await anyio.to_thread.run_sync(self.run.update)
            if now != stamp:
                page = await anyio.to_thread.run_sync(functools.partial(self.run.page, stamp, steps))
                stamp, steps = page["stamp"], page["steps_from"] + len(page["steps"])
                yield ServerSentEvent(msgspec.json.encode(page).decode(), event="run")
            await asyncio.sleep(self._poll_s)


def model_of(run_dir: Path) -> Path | None:
    """The model's folder that a run names, if it is (still) there."""
    name = read_json(run_dir / "run.json").get("model")
    for folder in (Path(str(name or "")), run_dir / "model"):
        if folder.parts and (folder / "tokenizer.json").is_file():
            return folder
    return None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _names(request: Request, key: str) -> list[str]:
    return [name for name in request.query_params.get(key, "").split(",") if name][:500]


def _number(request: Request, key: str) -> int:
    text = request.query_params.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ConfigError(f"{key} must be a number")
    return int(text)


def _start(request: Request) -> int:
    return _number(request, "from")


async def _unknown(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=404)
