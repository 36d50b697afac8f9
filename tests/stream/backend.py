"""A backend process that does nothing but ingest: `python -m tests.stream.backend FOLDER PORT`. Ends when its
stdin does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from gyre_backend.ingest import Ingest, ingest_routes


async def main(folder: Path, port: int) -> None:
    """Serve until stdin ends."""
    ingest = Ingest(folder)
    await ingest.resume()
    app = Starlette(routes=ingest_routes(ingest, authorize=lambda request: None))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
