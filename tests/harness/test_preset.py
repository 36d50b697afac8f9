"""Presets: shipped ones load, users' mistakes are one clear line, placeholders replace exactly what they should."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.preset import PLACEHOLDERS, fill, load_preset, preset_names


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
        ('name = "x"\ndialect = "chat"\ncommand = ["a"]\ninstall = "i"\nbogus = 1', "bogus: no such setting"),
        ('name = "x"\ndialect = "chat"\ninstall = "i"', "command: Field required"),
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
