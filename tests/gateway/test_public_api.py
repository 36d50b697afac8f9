"""The public surface of the SDK is frozen here: changing it means changing this file on purpose."""

from __future__ import annotations

import inspect
import subprocess
import sys

import gyre_sdk

NAMES = [
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

SIGNATURES = {
    "session": ["engine", "model", "gateway", "run_dir", "config", "task", "group", "harness", "meta"],
    "load_renderer": ["model_dir", "family", "options"],
    "verify_template": ["model_dir", "family", "options"],
    "Gateway": ["client", "renderer", "run_dir", "config", "sink"],
}

METHODS = {
    "Gateway": [
        "aclose",
        "app",
        "authenticate",
        "executions",
        "model_info",
        "open",
        "recover",
        "seal",
        "serving",
        "wal_path",
    ],
    "Session": ["compact", "finish", "fork", "headers", "http", "retry"],
}


def test_exported_names() -> None:
    assert sorted(gyre_sdk.__all__) == NAMES
    assert dir(gyre_sdk) == NAMES
    for name in NAMES:
        assert getattr(gyre_sdk, name) is not None


def test_signatures() -> None:
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(gyre_sdk, name)).parameters) == parameters


def test_methods() -> None:
    for name, methods in METHODS.items():
        members = inspect.getmembers(getattr(gyre_sdk, name), inspect.isfunction)
        assert [member for member, _ in members if not member.startswith("_")] == methods


def test_settings() -> None:
    fields = {
        f for cls in (gyre_sdk.GatewayConfig, gyre_sdk.PinnedSampling, gyre_sdk.Limits) for f in cls.__struct_fields__
    }
    assert fields == {
        "model", "matcher", "sampling", "limits", "keepalive_s", "max_body_bytes", "max_live_calls", "replay",
        "orphan_grace_s", "partial_every_s", "requests_per_s", "request_burst", "resume_attempts", "retry_after_s",
        "cache_salt", "metrics_token",
        "temperature", "top_p", "top_k", "max_new_tokens", "seed", "turns", "tokens", "nodes", "bytes",
    }  # fmt: skip


def test_the_wire_stays_light() -> None:
    heavy = ["networkx", "pydantic", "httpx", "starlette", "uvicorn", "renderers", "tokenizers", "anyio"]
    code = f"import sys, gyre_sdk.wire, gyre_sdk.wire.records; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_unknown() -> None:
    assert not hasattr(gyre_sdk, "nonsense")
