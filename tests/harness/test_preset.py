"""Presets: shipped ones load, users' mistakes are one clear line, placeholders replace exactly what they should."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.agents import CliAgent
from gyre_sdk.harness.preset import PLACEHOLDERS, HarnessPreset, fill, load_preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_loads_under_its_own_name(name: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset.dialect in {"chat", "responses", "messages", "gemini"}
    used = " ".join([*preset.command, *preset.env.values(), *preset.files.values()])
    assert "{token}" in used
    assert "{base_url}" in used


def test_unknown_harness_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown harness 'nosuch'; known are: .*mini-swe-agent"):
        load_preset("nosuch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1 =", "not valid TOML"),
        ("", "name, dialect, command: needed, but not given"),
        ('name = "x"\ndialect = "chat"\ncommand = ["a"]\ninstall = "i"\nbogus = 1', "bogus: no such key"),
        ('name = "x"\ndialect = "chat"\ninstall = "i"', "command: needed, but not given"),
        (
            'name = "x"\ndialect = "chat"\ninstall = "i"\ncommand = ["a", "{nosuch}"]',
            r"unknown placeholder \{nosuch\}",
        ),
    ],
)
def test_a_broken_preset_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_preset(str(path))


def test_missing_preset_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        load_preset(str(tmp_path / "nosuch.toml"))


@given(st.text(), st.dictionaries(st.sampled_from(sorted(PLACEHOLDERS)), st.text()))
def test_fill_never_touches_other_braces(text: str, values: dict[str, str]) -> None:
    plain = text.replace("{", "(")
    assert fill(plain, values) == plain


def test_fill_is_one_pass() -> None:
    """A value that looks like a placeholder (an instruction written by anyone) is not expanded again."""
    assert fill("{instruction} {token}", {"instruction": "{token}", "token": "secret"}) == "{token} secret"
    assert fill("{{task}} ${HOME} {x}", {"task": "no"}) == "{no} ${HOME} {x}"


def own(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preset.toml").write_text('name = "own"\ndialect = "chat"\n' + text)
    return folder


def test_a_folder_with_a_preset_is_a_harness_and_its_paths_start_there(tmp_path: Path) -> None:
    folder = own(tmp_path / "mine", 'command = ["python3", "{install}/loop.py"]\ninstall_dir = "."')
    for given_as in (folder, folder / "preset.toml"):
        agent = CliAgent(load_preset(str(given_as)))
        assert agent.install == folder
        assert Path(agent.executable).name == "python3"
        assert agent.mounts() == {folder: str(folder)}


def test_a_program_of_the_system_needs_no_installation(tmp_path: Path) -> None:
    agent = CliAgent(load_preset(str(own(tmp_path, 'command = ["sh", "-c", "true"]'))))
    assert (agent.install, agent.mounts()) == (None, {})


def test_the_installation_comes_before_the_system(tmp_path: Path) -> None:
    folder = own(tmp_path, 'command = ["sh"]\ninstall_dir = "."')
    for place in ("sh", "bin/sh"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).touch()
        assert CliAgent(load_preset(str(folder))).executable == str(folder / place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('command = ["no-such-program"]', "'no-such-program' is not among the system's programs"),
        ('command = ["sh"]\ninstall_dir = "gone"\ninstall = "make it"', "no folder .*gone. Install it: make it"),
    ],
)
def test_what_is_missing_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliAgent(load_preset(str(own(tmp_path, text))))


def test_the_harness_of_the_docs_is_whole() -> None:
    page = (Path(__file__).parents[2] / "docs/presets.md").read_text()
    preset, program = re.findall(r"```(?:toml|python)\n# mine/\S+\n(.*?)```", page, re.DOTALL)
    assert HarnessPreset.model_validate(tomllib.loads(preset)).name == "mine"
    compile(program, "loop.py", "exec")
