"""`python -m gyre_backend.service --config run.toml --run-dir DIR`: the backend of one run.

Prints one line on stdout when it serves: {"ready": true, "url": ...}. The admin token comes from
$GYRE_ADMIN_TOKEN; without it one is made
and kept in DIR/admin-token (readable by the owner only).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from gyre_backend.config import load_config
from gyre_backend.processes import die_with_parent
from gyre_backend.service.serve import first_error, serve
from gyre_backend.service.tokens import admin_token
from gyre_sdk.errors import GyreError


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Errors of ours are one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m gyre_backend.service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="where the run lives; an existing one is gone on with"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--detached", action="store_true", help="do not end when stdin does")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if not chosen.detached:
        die_with_parent()
    try:
        config = load_config(chosen.config)
        run_dir = chosen.run_dir.resolve()
        token = os.environ.pop("GYRE_ADMIN_TOKEN", "") or admin_token(run_dir)
        asyncio.run(serve(config, run_dir, token, chosen.host, chosen.port, keep_serving=False))
    except GyreError as error:
        return _say(error)
    except BaseExceptionGroup as group:
        first = first_error(group)
        if first is None:
            raise
        return _say(first)
    except KeyboardInterrupt:
        return 130
    return 0


def _say(error: GyreError) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
