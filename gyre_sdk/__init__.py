"""Gyre's SDK: sits in front of an agent harness and records what the policy really sampled, as a branch graph.

The names below are the public API. They are loaded when they are first used, so importing `gyre_sdk.wire` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig, Limits, PinnedSampling
    from gyre_sdk.capture.gateway import ExecutionHandle, Gateway
    from gyre_sdk.capture.renderer import TemplateReport, load_renderer, verify_template
    from gyre_sdk.errors import GyreError
    from gyre_sdk.graph import BranchGraph
    from gyre_sdk.sampling import SGLangClient, TokenClient
    from gyre_sdk.sessions import Session, session
    from gyre_sdk.wire.records import Outcome

_WHERE = {
    "BranchGraph": "gyre_sdk.graph",
    "ExecutionHandle": "gyre_sdk.capture.gateway",
    "ExecutionSpec": "gyre_sdk.capture.config",
    "Gateway": "gyre_sdk.capture.gateway",
    "GatewayConfig": "gyre_sdk.capture.config",
    "GyreError": "gyre_sdk.errors",
    "Limits": "gyre_sdk.capture.config",
    "Outcome": "gyre_sdk.wire.records",
    "PinnedSampling": "gyre_sdk.capture.config",
    "SGLangClient": "gyre_sdk.sampling",
    "Session": "gyre_sdk.sessions",
    "TemplateReport": "gyre_sdk.capture.renderer",
    "TokenClient": "gyre_sdk.sampling",
    "load_renderer": "gyre_sdk.capture.renderer",
    "session": "gyre_sdk.sessions",
    "verify_template": "gyre_sdk.capture.renderer",
}

__all__ = [
    "BranchGraph",
    "ExecutionHandle",
    "ExecutionSpec",
    "Gateway",
    "GatewayConfig",
    "GyreError",
    "Limits",
    "Outcome",
    "PinnedSampling",
    "SGLangClient",
    "Session",
    "TemplateReport",
    "TokenClient",
    "load_renderer",
    "session",
    "verify_template",
]


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'gyre_sdk' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
