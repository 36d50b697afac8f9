"""What a gateway process is told, as one line of JSON on its stdin: secrets are in no argument list and no environment."""

from __future__ import annotations

from typing import Literal

import msgspec

from gyre_sdk.capture.config import GatewayConfig
from gyre_sdk.capture.serving import Tls

ADMIN = "/gyre/v1"
"""Path prefix of what only the owner of a run may ask: open, seal, status, drain."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a gateway process needs. A restarted one is given the same."""

    run_dir: str
    model_dir: str
    engine_url: str
    engine_token: str | None = None
    config: GatewayConfig = GatewayConfig()
    family: str = "auto"
    """Renderer family; see `load_renderer`."""
    backend: tuple[str, str] | None = None
    """(url, admin token) of the training backend that the records are streamed to."""
    admin_token: str = ""
    """Opens and seals executions; empty serves no admin routes."""
    host: str = "127.0.0.1"
    listener: int = -1
    """Descriptor of the listening socket, which outlives the process."""
    tls: Tls | None = None
    unsealed: Literal["keep", "cancel"] = "keep"
    """What becomes of executions that an earlier run left open: they go on, or are sealed as cancelled (their harness is gone)."""


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /gyre/v1/executions`. `token`: the execution's API key, at least 16 characters; a random one when empty."""

    execution: str = ""
    token: str = ""
    group: str = ""
    task: str = ""
    harness: str = ""
    deadline_s: float | None = None
    meta: dict[str, str] = {}


class OpenReply(msgspec.Struct, frozen=True):
    """What an execution's owner needs."""

    execution: str
    token: str
    base_url: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /gyre/v1/status`."""

    executions: list[str]
    damaged: dict[str, str]
    """Executions whose log can't be gone on with, and why."""
    behind_bytes: int = 0
    """On disk, but not acknowledged by the backend yet."""
    stream_error: str = ""


__all__ = ["ADMIN", "GatewaySettings", "OpenReply", "OpenRequest", "Status", "Tls"]
