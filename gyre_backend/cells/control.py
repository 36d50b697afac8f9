"""The control routes of a cell: what the service may ask of it. Blocking work runs in one thread, never on
the event loop.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from gyre_backend.cells.engine_side import EngineSide
from gyre_backend.cells.replica import Replica
from gyre_backend.tree.plan import plan_from_bytes
from gyre_backend.weights import Manifest
from gyre_sdk.errors import EngineError, GyreError

T = TypeVar("T")


class CellControl:
    """Serialises what touches the trainer; the engine's own routes are not held up by it."""

    def __init__(self, replica: Replica, engine: EngineSide, token: str) -> None:
        self.replica = replica
        self.engine = engine
        self.role = "rollout"
        self._token = token
        self._lock = anyio.Lock()

    def app(self) -> Starlette:
        """The cell's whole ASGI application: control routes, and the engine's when it lives here."""
        routes: list[Route | Mount] = [Route("/cell/status", self._guarded(self._status), methods=["GET"])]
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "train": self._train,
            "serve": self._serve,
            "begin": self._begin,
            "micro": self._micro,
            "publish": self._publish,
            "pull": self._pull,
            "gradients": self._gradients,
            "add": self._add,
            "step": self._step,
            "save": self._save,
            "export": self._export,
        }
        routes += [Route(f"/cell/{name}", self._guarded(call), methods=["POST"]) for name, call in posts.items()]
        if self.engine.app is not None:
            routes.append(Mount("/", app=self.engine.app))
        return Starlette(routes=routes)

    def _guarded(self, call: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given, f"Bearer {self._token}"):
                return JSONResponse({"error": "a cell's control routes want its token"}, status_code=401)
            try:
                return await call(request)
            except EngineError as error:
                # The engine's trouble is the cell's: this is no refusal of what was asked.
                return JSONResponse({"error": f"its engine: {error}"}, status_code=503)
            except GyreError as error:
                return JSONResponse({"error": str(error)}, status_code=409)

        return guarded

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        async with self._lock:
            return await anyio.to_thread.run_sync(work, *arguments)

    async def _status(self, request: Request) -> Response:
        replica = self.replica
        return JSONResponse(
            {"role": self.role, "version": replica.version, "step": replica.step, "epoch": replica.epoch}
        )

    async def _train(self, request: Request) -> Response:
        await self.engine.release()
        self.role = "training"
        return JSONResponse({})

    async def _serve(self, request: Request) -> Response:
        """Training → rollout: what the trainer holds is what is served."""
        if self.replica.version < 0:
            return JSONResponse({"error": "this cell's weights are not whole; it can't serve"}, status_code=409)
        await self.engine.take(self.replica.version)
        await self.engine.resume()
        self.role = "rollout"
        return JSONResponse({"version": self.replica.version})

    async def _begin(self, request: Request) -> Response:
        body = await request.json()
        begin = functools.partial(self.replica.begin, body["step"], body["epoch"], keep=body["keep"])
        await self._in_thread(begin)
        return JSONResponse({})

    async def _micro(self, request: Request) -> Response:
        plan = plan_from_bytes(await request.body())
        query = request.query_params
        result = await self._in_thread(self.replica.micro, int(query["micro"]), int(query["epoch"]), plan)
        return Response(msgspec.json.encode(result), media_type="application/json")

    async def _publish(self, request: Request) -> Response:
        manifest = await self._in_thread(self.replica.publish_weights)
        return Response(manifest.to_bytes(), media_type="application/msgpack")

    async def _pull(self, request: Request) -> Response:
        """New weights. In rollout the engine is held still meanwhile and serves them afterwards."""
        manifest = Manifest.from_bytes(await request.body())
        serving = self.role == "rollout"
        if serving:
            await self.engine.freeze()
        report = await self._in_thread(self.replica.pull_weights, manifest)
        if serving:
            await self.engine.take(manifest.version)
            await self.engine.resume()
        return Response(msgspec.json.encode(report), media_type="application/json")

    async def _gradients(self, request: Request) -> Response:
        body = await request.json()
        manifest = await self._in_thread(self.replica.publish_gradients, body["epoch"], body["micros"])
        return Response(manifest.to_bytes(), media_type="application/msgpack")

    async def _add(self, request: Request) -> Response:
        manifest = Manifest.from_bytes(await request.body())
        micros = [int(part) for part in request.query_params["micros"].split(",") if part]
        nbytes = await self._in_thread(self.replica.add_gradients, manifest, micros)
        return JSONResponse({"bytes": nbytes})

    async def _step(self, request: Request) -> Response:
        """In rollout the engine is held still; `serve` lets it go on with the new weights."""
        body = await request.json()
        if self.role == "rollout":
            await self.engine.freeze()
        result = await self._in_thread(self.replica.optimizer_step, body["num_executions"], body["micros"])
        return Response(msgspec.json.encode(result), media_type="application/json")

    async def _save(self, request: Request) -> Response:
        body = await request.json()
        digest = await self._in_thread(self.replica.save, Path(body["path"]))
        return JSONResponse({"digest": digest})

    async def _export(self, request: Request) -> Response:
        body = await request.json()
        await self._in_thread(self.replica.trainer.export_hf, Path(body["path"]))
        return JSONResponse({})
