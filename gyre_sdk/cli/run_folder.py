"""One process at a time works in a run's folder, and a run goes on with what it was begun with."""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pydantic

from gyre_sdk.cli.assembly import RunInfo
from gyre_sdk.errors import ConfigError, explain_problems
from gyre_sdk.harness.config import SamplingConfig

LOCK = "run.lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep others out of a run. Raises ConfigError when another process is at work in it, or the folder can't be written."""
    try:
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"the run folder {folder} can't be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another gyre is at work in {folder}; wait for it, end it, or give another --run-dir"
            ) from error
        yield


def begun_with(folder: Path) -> RunInfo | None:
    """What `run.json` of a folder says; None when there is none. Raises ConfigError when it is damaged."""
    path = folder / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


def refuse_another_run(folder: Path, info: RunInfo) -> RunInfo:
    """For --resume: the run as it was begun. Raises ConfigError naming what is asked for differently now."""
    before = begun_with(folder)
    if before is None:
        return info
    options = {"harness": "-a", "model": "-m", "group_size": "-g", "tasks": "-t or --only"}
    for field, option in options.items():
        was, now = getattr(before, field), getattr(info, field)
        if was != now:
            raise ConfigError(
                f"{folder} was begun with {option} {_shown(was)}, not {_shown(now)}; --resume goes on as it was begun"
            )
    return before


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list | tuple) else str(value)


def sampling_of(temperature: float, max_new_tokens: int) -> SamplingConfig:
    """The pinned sampling of the command line. Raises ConfigError."""
    try:
        return SamplingConfig(temperature=temperature, max_new_tokens=max_new_tokens)
    except pydantic.ValidationError as error:
        raise ConfigError("--" + explain_problems(SamplingConfig, error.errors()).replace("_", "-", 2)) from error


def checked_deadline(seconds: float | None) -> float | None:
    """An upper bound in seconds. Raises ConfigError for what bounds nothing."""
    if seconds is not None and not (0 < seconds < math.inf):
        raise ConfigError(f"--deadline must be a positive number of seconds, not {seconds:g}")
    return seconds
