"""Every command says what it is for; nothing of a help text is eaten by markup; the page of the TOML file is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gyre_sdk.cli import doctor
from gyre_sdk.cli.app import make_app

ROOT = Path(__file__).resolve().parents[2]


def test_each_command_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    app = make_app()
    app(["--help"], console=Console(width=200, color_system=None))
    shown = capsys.readouterr().out
    for name in (
        "doctor",
        "demo",
        "run",
        "train",
        "serve",
        "gateway",
        "graph",
        "view",
        "top",
        "plot",
        "sim",
        "forecast",
    ):
        (line,) = [line for line in shown.splitlines() if line.strip("│ ").startswith(name + " ")]
        assert len(line.strip("│ ").removeprefix(name).strip()) > 10, line


@pytest.mark.parametrize(
    ("command", "folder"), [("run", "TIME-run"), ("train", "TIME-train"), ("import", "TIME-import")]
)
def test_default_folders_are_told(command: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_app()([command, "--help"], console=Console(width=200, color_system=None))
    assert folder in capsys.readouterr().out


def test_doctor_shows_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = "pip install 'gyre[sglang]'"
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([doctor.Finding("part[x]", "missing", told)]),))
    doctor.doctor()
    shown = capsys.readouterr().out
    assert told in shown
    assert "part[x]" in shown


def test_the_page_of_the_toml_file_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts/config_reference.py"), "--check"], timeout=120)
    assert done.returncode == 0, "run python scripts/config_reference.py"
