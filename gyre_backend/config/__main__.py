"""`python -m gyre_backend.config FILE`: whether a TOML file is one that the backend takes. Exit code 2 and one line when not."""

from __future__ import annotations

import sys
from pathlib import Path

from gyre_backend.config import load_config
from gyre_sdk.errors import ConfigError


def main() -> int:
    """Entry point."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m gyre_backend.config FILE\n")
        return 2
    try:
        load_config(Path(sys.argv[1]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
