"""Sandboxes: where a harness works and a verifier grades. One protocol, several backends, chosen by trying them."""

from gyre_sdk.environments.sandbox.base import (
    Capabilities,
    ExecResult,
    Limits,
    Network,
    Sandbox,
    SandboxProcess,
    SandboxSpec,
)
from gyre_sdk.environments.sandbox.choose import BACKENDS, Probe, create, probe, probe_backends, resolve
from gyre_sdk.environments.sandbox.journal import Swept, sweep

__all__ = [
    "BACKENDS",
    "Capabilities",
    "ExecResult",
    "Limits",
    "Network",
    "Probe",
    "Sandbox",
    "SandboxProcess",
    "SandboxSpec",
    "Swept",
    "create",
    "probe",
    "probe_backends",
    "resolve",
    "sweep",
]
