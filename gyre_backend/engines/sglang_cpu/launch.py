"""How the server is started without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

from gyre_backend.engines.sglang_cpu.install import installed
from gyre_sdk.errors import ConfigError

FLAGS = (
    "--device", "cpu", "--dtype", "float32",
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--disable-overlap-schedule", "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled",
    "--max-total-tokens", "16384", "--max-running-requests", "16", "--mem-fraction-static", "0.1",
    "--skip-tokenizer-init", "--skip-server-warmup", "--incremental-streaming-output",
)  # fmt: skip


def launch_command(
    venv: Path, model: str, port: str, *, version: str = "0", more: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Serves `model` on 127.0.0.1:`port`; what is in `more` comes last and wins.

    `model` and `port` may be `{model}` and `{port}`: then it is a value for `engine.command`. Raises ConfigError.
    """
    if not installed(venv):
        raise ConfigError(f"no SGLang in {venv}: python -m gyre_backend.engines.sglang_cpu install {venv}")
    environment = [f"{name}={value}" for name, value in launch_environment().items()]
    return (
        "/usr/bin/env", *environment, str(venv / "bin" / "python"), "-m", "sglang.launch_server",
        "--model-path", model, "--host", "127.0.0.1", "--port", port, "--weight-version", version, *FLAGS, *more,
    )  # fmt: skip


def launch_environment() -> dict[str, str]:
    """Variables that the server needs."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
