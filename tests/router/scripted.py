"""An engine whose next token is a function of the whole context: however a reply is cut and moved, it must come out the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def next_token(context: list[int]) -> int:
    return (sum(context) * 31 + len(context) * 7) % 997


def expected(prompt: list[int], count: int) -> list[int]:
    """What any set of engines must answer."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class Scripted:
    """`pace_s` between tokens; `die_at` tokens into a reply the connection breaks (once per entry)."""

    def __init__(
        self, name: str, *, version: str = "1", pace_s: float = 0.0, slots: int = 16, cumulative: bool = False
    ):
        self.name, self.version, self.pace_s, self.slots, self.cumulative = name, version, pace_s, slots, cumulative
        self.die_at: list[int] = []
        self.refuse: list[int] = []
        self.deaf = False
        """Ignores aborts."""
        self.is_ready = True
        self.aborted: set[str] = set()
        self.seen: list[dict[str, Any]] = []
        self.live: set[str] = set()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/model_info", self._info),
                Route("/server_info", self._info),
                Route("/ready", self._ready),
            ]
        )

    async def _info(self, request: Request) -> Response:
        return JSONResponse(
            {"model_path": "scripted", "weight_version": self.version, "max_running_requests": self.slots}
        )

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self.is_ready else 503)

    async def _abort(self, request: Request) -> Response:
        if not self.deaf:
            self.aborted.add((await request.json())["rid"])
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        if self.refuse:
            return JSONResponse({"error": {"message": "no"}}, self.refuse.pop(0))
        assert body["stream"], "a router always streams"
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        rid, context = body["rid"], list(body["input_ids"])
        wanted = body["sampling_params"]["max_new_tokens"]
        dies = self.die_at.pop(0) if self.die_at else None
        out: list[int] = []
        self.live.add(rid)
        try:
            while True:
                if rid in self.aborted:
                    yield self._line(body, out, [], {"type": "abort", "message": "Aborted"})
                    break
                if dies is not None and len(out) >= dies:
                    raise ConnectionResetError("scripted death")
                token = next_token(context)
                context.append(token)
                out.append(token)
                finish = {"type": "length", "length": wanted} if len(out) >= wanted else None
                yield self._line(body, out, [token], finish)
                if finish:
                    break
                await asyncio.sleep(self.pace_s)
            yield "data: [DONE]\n\n"
        finally:
            self.live.discard(rid)

    def _line(self, body: dict[str, Any], out: list[int], new: list[int], finish: dict[str, Any] | None) -> str:
        ids = out if self.cumulative else new
        meta = {
            "id": body["rid"], "finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0,
            "completion_tokens": len(out), "weight_version": self.version, "num_retractions": 0,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(out)}] if out else [],
            "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
        }  # fmt: skip
        return f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n\n"
