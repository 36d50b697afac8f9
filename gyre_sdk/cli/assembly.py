"""What `run`, `train` and `demo` put together: a model folder, an engine, a gateway, an agent, a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from gyre_sdk.cli.children import service
from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.agents import Agent, CliAgent
from gyre_sdk.harness.preset import load_preset

KNOWN_MODELS = ("smollm2", "tiny")
ENGINE_START_S = 180.0


def resolve_model(name: str, console: Console) -> Path:
    """A model's folder: a path, or one of the names that Gyre can make. Raises ConfigError."""
    if name in KNOWN_MODELS:
        return _make_model(name, console)
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        what = f"{path} holds no config.json" if path.is_dir() else f"unknown model {name!r}: no such folder"
        raise ConfigError(f"{what}; give a Hugging Face model folder, or one of: {', '.join(KNOWN_MODELS)}")
    return path.resolve()


def _make_model(name: str, console: Console) -> Path:
    """Made by the backend in a process of its own: the SDK loads no tensor library."""
    with console.status(f"preparing model {name} (once)"):
        done = subprocess.run(
            [sys.executable, "-m", "gyre_backend.models", name], capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        why = words[-1].removeprefix("error:").strip() if words else f"exit code {done.returncode}"
        raise ConfigError(f"model {name} could not be made: {why}")
    return Path(lines[-1].strip())


def make_run_dir(wanted: Path | None, name: str) -> Path:
    """The run's folder: as asked for, else `$GYRE_RUNS` or ./runs, with the UTC time in its name."""
    if wanted is None:
        root = Path(os.environ.get("GYRE_RUNS", "runs"))
        wanted = root / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run folder {wanted} can't be made: {error.strerror}") from error
    return wanted.resolve()


def make_agent(harness: str, install: str | None) -> Agent:
    """An agent by name: `oracle`, `nop`, a preset's name, or the path of a preset file."""
    if harness in ("oracle", "nop"):
        from gyre_sdk.harness.builtin import NopAgent, OracleAgent

        return OracleAgent() if harness == "oracle" else NopAgent()
    return CliAgent(load_preset(harness), Path(install) if install else None)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What `run.json` says of a run; enough to read it without the configuration."""

    kind: str
    started: float
    model: str
    harness: str
    tasks: Sequence[str]
    group_size: int

    def write(self, run_dir: Path) -> None:
        """Write it, replacing an older one in one move."""
        path = run_dir / "run.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        temporary.replace(path)


@asynccontextmanager
async def embedded_engine(model_dir: Path, run_dir: Path) -> AsyncIterator[str]:
    """The embedded engine on a model folder, as a child; yields its URL."""
    arguments = ["--model", str(model_dir), "--port", "0", "--log", str(run_dir / "engine-tokens.jsonl")]
    async with service(
        "gyre_backend.engines.embedded", arguments, log=run_dir / "engine.log", timeout_s=ENGINE_START_S
    ) as child:
        yield child.url
