"""A run's folder belongs to one process at a time, and --resume goes on with what was begun."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_sdk.cli.assembly import RunInfo
from gyre_sdk.cli.run import run
from gyre_sdk.cli.run_folder import begun_with, checked_deadline, held, refuse_another_run, sampling_of
from gyre_sdk.errors import ConfigError

TASKS = Path(__file__).resolve().parents[2] / "examples/tasks/make-file"
INFO = RunInfo("run", 5.0, "tiny", "mine", ["a", "b"], 4)
TRY = """
import sys
from pathlib import Path
from gyre_sdk.cli.run_folder import held
from gyre_sdk.errors import ConfigError
try:
    with held(Path(sys.argv[1])):
        print("in")
except ConfigError as error:
    print(error)
"""


def other_process(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", TRY, str(folder)], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_a_second_process_is_kept_out_until_the_first_is_done(tmp_path: Path) -> None:
    with held(tmp_path):
        assert "another gyre is at work" in other_process(tmp_path)
    assert other_process(tmp_path) == "in"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be written"), held(tmp_path / "nosuch"):
        pass


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (replace(INFO, harness="oracle"), "-a mine, not oracle"),
        (replace(INFO, model=""), "-m tiny, not "),
        (replace(INFO, group_size=1), "-g 4, not 1"),
        (replace(INFO, tasks=["a"]), "-t or --only a,b, not a"),
    ],
)
def test_another_run_does_not_go_on_in_this_one(tmp_path: Path, now: RunInfo, says: str) -> None:
    INFO.write(tmp_path)
    with pytest.raises(ConfigError, match=says):
        refuse_another_run(tmp_path, now)
    assert begun_with(tmp_path) == INFO


def test_the_begin_of_a_run_is_kept(tmp_path: Path) -> None:
    assert refuse_another_run(tmp_path, INFO) == INFO
    INFO.write(tmp_path)
    assert refuse_another_run(tmp_path, replace(INFO, started=9.0)) == INFO
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json can't be read"):
        begun_with(tmp_path)


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("nan"), float("inf")])
def test_a_deadline_that_bounds_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--deadline must be"):
        checked_deadline(seconds)
    assert checked_deadline(None) is None
    assert checked_deadline(2.5) == 2.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((-1.0, 10), "--temperature"), ((float("nan"), 10), "--temperature"), ((1.0, -4), "--max-new-tokens")],
)
def test_sampling_that_cannot_be_is_refused(arguments: tuple[float, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sampling_of(*arguments)


def test_mistakes_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in (
        {"sandbox": "foo"},
        {"deadline": 0.0},
        {"temperature": -1.0},
        {"jobs": 0},
        {"group_size": 0},
        {"resume": True},
    ):
        with pytest.raises(ConfigError):
            run(tasks=TASKS, harness="nop", **wrong)
    assert list(tmp_path.iterdir()) == []
