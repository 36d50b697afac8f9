"""The command line: users' mistakes are one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gyre_sdk.errors import GyreError


def gyre(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    return subprocess.run(
        [sys.executable, "-c", "from gyre_sdk.cli import main; main()", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


TASK = """schema_version = "1.4"
[agent]
timeout_sec = "soon"
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "-t", "nosuch", "-a", "nop"], "nosuch: no such folder"),
        (["run", "-t", "bad", "-a", "nop"], "task.toml"),
        (["run", "-t", "good", "-a", "nosuch"], "unknown harness 'nosuch'"),
        (["run", "-t", "good", "-a", "mini-swe-agent"], "Install it: "),
        (["run", "-t", "good", "-a", "nop", "-g", "0"], "--group-size must be at least 1"),
        (["run", "-t", "good", "-a", "nop", "--resume", "--run-dir", "empty"], "nothing to resume"),
        (["run", "-t", "good", "-a", "nop", "--only", "other"], "no task 'other'"),
        (["train", "nosuch.toml"], "no such file: nosuch.toml"),
        (["train", "broken.toml"], "not valid TOML"),
        (["train", "unknown.toml"], "run.bogus: no such key"),
        (["graph", "nosuch"], "no execution 'nosuch'"),
        (["graph"], "no runs under"),
        (["wal", "verify", "nosuch"], "no WAL at nosuch"),
        (["export", "nosuch", "--to", "graphml"], "no execution 'nosuch'"),
        (["verify-template", "nosuch"], "nosuch"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "broken.toml").write_text("[run\n")
    (tmp_path / "unknown.toml").write_text('[run]\ntasks = "good"\nbogus = 1\n')
    for name, text in (("bad", TASK), ("good", TASK.replace('"soon"', "5"))):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "task.toml").write_text(text)
        (tmp_path / name / "instruction.md").write_text("do it\n")
        (tmp_path / name / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    done = gyre(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_needs_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom gyre_sdk.cli.app import make_app\nmake_app()\n"
        "print(sorted({'torch', 'transformers', 'networkx', 'starlette'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_of_ours_is_pickled_and_printed_in_one_line() -> None:
    import pickle

    import gyre_backend.errors
    import gyre_sdk.errors

    kinds = {
        kind
        for module in (gyre_sdk.errors, gyre_backend.errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, GyreError)
    }
    for kind in kinds:
        error = kind("torch", "backend") if kind.__name__ == "MissingExtraError" else kind("what went wrong")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error)
        assert "\n" not in str(error)
