"""The `[run]` and `[sampling]` tables of a TOML file: what the SDK side of a run does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pydantic

from gyre_sdk.errors import ConfigError, explain_problems


class SamplingConfig(pydantic.BaseModel):
    """Sampling that the server pins, whatever the harness asks for."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    temperature: float = pydantic.Field(default=1.0, ge=0.0, le=2.0)
    """Softmax temperature. Training wants 1.0: the trainer recomputes logprobs at this temperature."""
    top_p: float = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus; 1.0 keeps the policy's own distribution, which training needs."""
    max_new_tokens: int = pydantic.Field(default=1024, ge=1)
    """Upper bound on one reply, in tokens; a harness may ask for less."""


class RunConfig(pydantic.BaseModel):
    """What is run, and where."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    tasks: str
    """Folder of a task, or of many. Relative paths start at the TOML file's folder."""
    only: tuple[str, ...] = ()
    """Names of the tasks to take; empty takes all."""
    harness: str = "mini-swe-agent-text"
    """Preset name, path of a preset.toml, `oracle` or `nop`."""
    harness_install: str | None = None
    """Folder of the harness's installation; the preset's default when not given."""
    group_size: int = pydantic.Field(default=4, ge=1)
    """Executions of one task that share a baseline (G)."""
    slots: int = pydantic.Field(default=4, ge=1)
    """Executions at the same time on this machine."""
    sandbox: str = "auto"
    """auto | bwrap | unshare | podman | docker | process."""
    deadline_s: float | None = pydantic.Field(default=None, gt=0)
    """Upper bound in seconds on an agent's time in one execution."""


class RunFile(pydantic.BaseModel):
    """The SDK's view of a TOML file: its own tables, and the others as they are."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    run: RunConfig
    sampling: SamplingConfig = SamplingConfig()


def load_run_file(path: Path) -> RunFile:
    """Read a TOML file. Raises ConfigError with the file, the key and what was expected."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; a TOML file is wanted") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    try:
        return RunFile.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: {explain_problems(RunFile, error.errors())}") from error
