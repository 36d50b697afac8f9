"""A harness as data: how an installed CLI is pointed at the gateway, told its task and started inside the sandbox.

A preset is a small TOML file. Strings in `command`, `env` and `files` may hold these placeholders:

    {base_url}     the gateway, as seen from inside the sandbox, without `/v1`
    {token}        the execution's secret: the harness's API key
    {model}        the model's name
    {instruction}  the task's instruction
    {deadline_s}   seconds until the execution is killed
    {workdir}      the task's working directory inside the sandbox
    {config}       a private folder inside the sandbox; the keys of `files` are paths in it
    {install}      the folder of the harness's installation on this machine, visible read-only inside the sandbox
                   (only where `install_dir` or --harness-install names one)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pydantic

from gyre_sdk.errors import ConfigError, explain_problems

PRESETS = Path(__file__).parent / "presets"
PLACEHOLDERS = frozenset({"base_url", "token", "model", "instruction", "deadline_s", "workdir", "config", "install"})
_placeholder = re.compile(r"\{([a-z_]+)\}")


class HarnessPreset(pydantic.BaseModel):
    """One known harness. Unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str
    """What `--harness` is given."""
    dialect: str
    """Wire format it speaks: chat | responses | messages | gemini."""
    command: tuple[str, ...]
    """argv; the first word is found in {install}/bin, in {install}, or among the system's programs."""
    install: str = ""
    """How to install it, for the error message when it is missing."""
    install_dir: str = ""
    """Folder of the installation when the user names none: relative to the working directory in a preset that ships with Gyre,
    to the preset's own folder in a user's. Empty: a program of the system is enough."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Path under {config} -> content."""
    trajectory: str = ""
    """Path of the harness's own record of the run, if it writes one; kept beside the WAL."""
    exit_ok: tuple[int, ...] = (0,)
    """Exit codes that mean the harness itself worked (whatever the model did)."""

    @pydantic.model_validator(mode="after")
    def _placeholders_are_known(self) -> HarnessPreset:
        texts = [*self.command, *self.env.values(), self.trajectory]
        unknown = {name for text in texts for name in _placeholder.findall(text)} - PLACEHOLDERS
        if unknown:
            known = ", ".join(sorted(PLACEHOLDERS))
            raise ValueError(f"unknown placeholder {{{sorted(unknown)[0]}}}; known are {known}")
        return self


def preset_names() -> list[str]:
    """Names of the presets that ship with Gyre, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_preset(name_or_path: str) -> HarnessPreset:
    """A shipped preset by name, or the user's own by the path of a .toml file. Raises ConfigError."""
    folder = Path(name_or_path, "preset.toml")
    if folder.is_file() and name_or_path not in preset_names():
        return load_preset(str(folder))
    own = name_or_path.endswith(".toml")
    path = Path(name_or_path) if own else PRESETS / f"{name_or_path}.toml"
    if not path.is_file():
        what = f"no file {path}" if own else f"unknown harness {name_or_path!r}"
        raise ConfigError(
            f"{what}; known are: oracle, nop, {', '.join(preset_names())}; or give the path of a preset.toml"
        )
    try:
        preset = HarnessPreset.model_validate(tomllib.loads(path.read_text()))
        if own and preset.install_dir:
            preset = preset.model_copy(update={"install_dir": str(path.resolve().parent / preset.install_dir)})
        return preset
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: {explain_problems(HarnessPreset, error.errors())}") from error


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the known placeholders; other braces (JSON, Jinja, shell) stay as they are."""
    return _placeholder.sub(lambda match: values.get(match.group(1), match.group(0)), text)
