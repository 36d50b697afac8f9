"""What a cell's process is told at its start, and what it answers. Sent as one JSON line on its stdin: no
secret in argv.
"""

from __future__ import annotations

from typing import Any

import msgspec


class CellSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a cell needs to come up."""

    name: str
    index: int
    """0 is the core."""
    model_dir: str
    config: dict[str, Any]
    """The backend's configuration (`BackendConfig` as JSON)."""
    run_dir: str
    token: str
    """Bearer token of the control routes."""
    checkpoint: str = ""
    """Checkpoint to start from; empty: the model folder, as version 0."""
    env: dict[str, str] = {}


class CellReady(msgspec.Struct, frozen=True, kw_only=True):
    """The one line that a cell prints on stdout."""

    ready: bool
    url: str
    """Control routes under /cell, and the engine's own when it lives in the cell's process."""
    engine_url: str
    pid: int
    version: int
    context: int
    """Longest prompt plus reply, tokens."""
    estimator: str
    weighting: str
    whole_replies: bool
