"""A wrong settings file: one line that names the user's own file and key, and nothing left behind."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.config import parse_config
from gyre_sdk.cli.live import reward_bars
from gyre_sdk.cli.train import train
from gyre_sdk.environments.rewards import MOST, RewardMissing, read_rewards
from gyre_sdk.errors import ConfigError

GOOD = '[run]\ntasks = "t"\nharness = "nop"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nstps = 3\n", r"train\.stps: no such key; did you mean steps\?"),
        ("[cels]\ncount = 2\n", r"cels: no such table; did you mean cells\?"),
        ("train = 5\n", "train: must be a table"),
        ('[train]\nsteps = "x"\nlr = "y"\n', r"train\.steps: must be a valid integer.*\(and 1 more\)"),
        ('[model]\ndtype = "float8"\n', r"model\.dtype: must be 'float32', 'float64' or 'bfloat16'"),
    ],
)
def test_the_backend_s_tables_are_checked_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine.toml"
    config.write_text((text + GOOD) if text.startswith("train") else GOOD + text)
    with pytest.raises(ConfigError, match=rf"mine\.toml: {says}"):
        train(config)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[run]\ntask = "t"\n', "run.tasks: needed, but not given"),
        ('[run]\ntasks = "t"\nslot = 2\n', r"run\.slot: no such key; did you mean slots\?"),
        ("run = 1\n", "run: must be a table"),
    ],
)
def test_the_runner_s_tables_too(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=says):
        train(config, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_no_toml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        train(tmp_path)


def test_to_go_on_a_run_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match="--resume needs --run-dir"):
        train(tmp_path / "mine.toml", resume=True)


NONSENSE = st.dictionaries(
    st.text(max_size=8), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3
)


@given(NONSENSE, st.sampled_from(["train", "cells", "nosuch", ""]))
def test_any_nonsense_is_refused_with_our_own_error_or_taken(table: dict[str, object], name: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_config({name: table} if name else table)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_bars_are_drawn_of_any_rewards(rewards: list[float]) -> None:
    assert len(reward_bars(rewards)) == 10


@pytest.mark.parametrize("text", ["1e308", "-1e7", "nan", "inf", "1e999", "9" * 400])
def test_a_reward_that_would_spoil_its_group_is_none(tmp_path: Path, text: str) -> None:
    for name in ("reward.txt", "reward.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(RewardMissing):
            read_rewards(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "reward.txt").write_text(str(MOST))
    assert math.isfinite(read_rewards(tmp_path)["reward"])
