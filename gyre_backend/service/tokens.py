"""The admin token of a service that was given none."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def admin_token(run_dir: Path) -> str:
    """The token in `run_dir/admin-token`, made there when it is missing; only the owner can read the file."""
    path = run_dir / "admin-token"
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        held = path.read_text().strip()
        if held:
            return held
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC, 0o600)
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    return token
