"""One log that can't be read spoils no command that reads the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.viewer_runs import long_story
from gyre_backend.sim.cli import forecast
from gyre_backend.sim.trace import read_trace
from gyre_sdk.cli.export import export
from gyre_sdk.errors import ConfigError, CorruptRecordError
from gyre_sdk.wire import WalReader, verify


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three good executions, one whose log is a folder, one of noise, one cut in its middle."""
    for number in range(3):
        story = long_story(f"00000000000{number}", 4, 200)
        story.seal(0.5)
        story.write(tmp_path)
    for name in ("folder", "noise", "flipped"):
        (tmp_path / "executions" / name).mkdir()
    (tmp_path / "executions/folder/wal.gyre").mkdir()
    (tmp_path / "executions/noise/wal.gyre").write_bytes(b"not a log at all" * 9)
    data = bytearray((tmp_path / "executions/000000000000/wal.gyre").read_bytes())
    data[40] ^= 0xFF
    (tmp_path / "executions/flipped/wal.gyre").write_bytes(bytes(data))
    return tmp_path


def test_the_others_are_exported_and_what_was_left_out_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(str(run), to="node-link", out=tmp_path / "out") == 1
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert "left out: " in capsys.readouterr().out


def test_the_others_are_a_trace(run: Path) -> None:
    assert len(list(read_trace(run))) == 3


def test_a_folder_in_place_of_a_log_is_damage(run: Path) -> None:
    log = run / "executions/folder/wal.gyre"
    with pytest.raises(CorruptRecordError, match="can't be read"):
        list(WalReader(log).frames())
    assert not verify(log).ok


def test_a_forecast_needs_steps_behind_its_warm_up(run: Path) -> None:
    with pytest.raises(ConfigError, match="--steps must be more than"):
        forecast(run, steps=4)
