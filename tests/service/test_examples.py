"""The examples that the documentation names: their files fit what reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from gyre_backend.config import load_config
from gyre_backend.service.serve import policy_config
from gyre_sdk.cli.train import _harness
from gyre_sdk.environments import load_tasks
from gyre_sdk.harness.config import load_run_file
from gyre_sdk.harness.preset import load_preset

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_is_read_by_both_sides(path: Path) -> None:
    settings = load_run_file(path)
    config = load_config(path)
    policy_config(config)
    assert config.train.group_size == settings.run.group_size
    assert load_tasks((path.parent / settings.run.tasks).resolve())
    preset = load_preset(_harness(settings.run.harness, path.parent))
    if settings.run.harness.endswith(".toml"):
        assert settings.run.harness_install is not None
        script = path.parent / settings.run.harness_install / "bin" / preset.command[0]
        assert script.stat().st_mode & 0o100, f"{script} can't be run"


@pytest.mark.parametrize(
    ("text", "reward"), [(None, 0.0), ("xyz", 0.0), ("a" * 30, 0.075), ("o" * 399, 0.997), ("e" * 900, 1.0)]
)
def test_the_vowels_are_counted(text: str | None, reward: float, tmp_path: Path) -> None:
    (tmp_path / "logs" / "verifier").mkdir(parents=True)
    if text is not None:
        (tmp_path / "words.txt").write_text(text)
    script = EXAMPLES / "elastic" / "tasks" / "vowels" / "tests" / "test.sh"
    subprocess.run(
        ["bash", script], cwd=tmp_path, env={"GYRE_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True
    )
    assert msgspec.json.decode((tmp_path / "logs/verifier/reward.json").read_bytes()) == {"reward": reward}
