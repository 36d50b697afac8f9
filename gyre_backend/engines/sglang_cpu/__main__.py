"""python -m gyre_backend.engines.sglang_cpu install VENV | serve VENV MODEL PORT [server arguments ...]"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gyre_backend.engines.sglang_cpu.install import install
from gyre_backend.engines.sglang_cpu.launch import launch_command
from gyre_sdk.errors import GyreError


def main(arguments: list[str]) -> int:
    """Install, or become the server."""
    try:
        match arguments:
            case ["install", venv]:
                install(Path(venv).absolute(), say=lambda text: print(text, file=sys.stderr))  # noqa: T201
                return 0
            case ["serve", venv, model, port, *more]:
                from gyre_backend.models import model_dir

                command = launch_command(Path(venv).absolute(), str(model_dir(model)), port, more=tuple(more))
                os.execv(command[0], command)
    except GyreError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write(f"{__doc__}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
