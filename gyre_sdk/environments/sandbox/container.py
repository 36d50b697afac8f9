"""Sandboxes of a container engine's command line: `podman` or `docker`."""

from __future__ import annotations

import shutil
import subprocess


def engine_problem(engine: str) -> str:
    """Why the engine can't be used; empty when it answers."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    try:
        answer = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{engine} does not answer: {error}"
    if answer.returncode != 0 or "ERROR" in answer.stderr.upper():
        lines = [line for line in (answer.stderr + answer.stdout).strip().splitlines() if line]
        return f"{engine} does not answer: {lines[-1] if lines else 'no message'}"
    return ""
