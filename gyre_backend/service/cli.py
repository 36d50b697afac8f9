"""`gyre serve`: the backend of a run as a service of its own, for runners that join and leave."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from gyre_backend.config import load_config
from gyre_backend.service.serve import serve as serve_run
from gyre_backend.service.tokens import admin_token


def serve(config: Path, *, run_dir: Path, host: str = "127.0.0.1", port: int = 0) -> int:
    """Serve the backend of one run: cells, router, ingest, training. It ends when the last step is done.

    `gyre train CONFIG --backend-url URL` joins it with $GYRE_ADMIN_TOKEN and works off its orders. Started again on the same
    folder it goes on from its ledger and its last checkpoint. Prints one JSON line with the address when it serves.

    Parameters
    ----------
    config
        TOML file; `docs/configuration.md` lists its keys. [run] and [sampling] are left to the runners.
    run_dir
        Where the run lives.
    host
        Address to bind to.
    port
        0 takes a free one.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings, folder = load_config(config), run_dir.resolve()
    given = os.environ.pop("GYRE_ADMIN_TOKEN", "")
    if not given:
        sys.stderr.write(f"the admin token is in {folder / 'admin-token'}; runners want it as GYRE_ADMIN_TOKEN\n")
    asyncio.run(serve_run(settings, folder, given or admin_token(folder), host, port, keep_serving=False))
    return 0
