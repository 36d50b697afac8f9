"""HTTP in front of the ingest: `POST /v1/frames`, with bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gyre_backend.errors import IngestError
from gyre_backend.ingest.ingest import Ingest
from gyre_sdk.errors import CorruptRecordError, StorageError

MAX_BODY_BYTES = 288 * 2**20
"""Room for one frame of the greatest size; senders send a few megabytes at a time."""
PARALLEL_BODIES = 4


def ingest_routes(ingest: Ingest, *, authorize: Callable[[Request], Response | None]) -> list[Route]:
    """The routes. `authorize` returns the answer for a request that may not come in, else None."""
    slots = asyncio.Semaphore(PARALLEL_BODIES)

    async def frames(request: Request) -> Response:
        refusal = authorize(request)
        if refusal is not None:
            return refusal
        execution = request.query_params.get("execution", "")
        async with slots:
            try:
                body = await _body(request)
                return JSONResponse({"want": await ingest.receive(execution, body)})
            except IngestError as error:
                return JSONResponse({"error": str(error)}, status_code=error.status)
            except (StorageError, CorruptRecordError) as error:
                return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "2"})

    return [Route("/v1/frames", frames, methods=["POST"])]


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise IngestError(f"a body holds at most {MAX_BODY_BYTES} bytes", status=413)
        chunks.append(chunk)
    return b"".join(chunks)
