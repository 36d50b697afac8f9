"""An engine process whose log survives it: `python -m tests.faults.engine MODEL LOG LISTENER SEED`. Ends when its stdin does.

What it is about to say is in the log before anybody hears it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.capture.serving import serve_app
from gyre_sdk.sampling import Chunk, Completion, GenerateRequest
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine, ScriptedServer


class LoggedEngine(ScriptedEngine):
    """Appends every request and every chunk to a file."""

    file = -1

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Completion]:
        self._log({"rid": request.rid, "input": request.input_ids.tolist()})
        async for event in super().generate(request):
            if isinstance(event, Chunk):
                self._log({"rid": request.rid, "output": event.output_ids.tolist()})
            yield event

    def _log(self, entry: dict[str, object]) -> None:
        os.write(self.file, json.dumps(entry).encode() + b"\n")


async def main(model: Path, log: Path, listener: int, seed: int) -> None:
    """Serve until stdin ends."""
    random = Random(seed)

    def script(call: ScriptedCall) -> Say:
        words = " ".join(random.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(random.randint(5, 40)))
        return Say(words, chunk=2, delay=random.choice([0.0, 0.03, 0.1]))

    engine = LoggedEngine(load_renderer(model), script)
    engine.decode_prompts = False
    engine.file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    app = ScriptedServer(engine).app()
    async with serve_app(app, "127.0.0.1", 0, listener=socket.socket(fileno=listener)):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
