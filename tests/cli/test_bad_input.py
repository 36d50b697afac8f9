"""What a user gets wrong about the backend's processes ends in one clear line and exit code 2 too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BLOCK_TORCH = (
    "import sys\n"
    "class Blocked:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] == 'torch':\n"
    "            raise ImportError('No module named torch', name='torch')\n"
    "sys.meta_path.insert(0, Blocked())\n"
)


def run(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run it as a child whose stdin stays open: our services end when it does."""
    read_end, write_end = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            stdin=read_end,
        )
    finally:
        os.close(read_end)
        os.close(write_end)


def module(name: str) -> str:
    return f"import runpy, sys\nsys.argv[0] = {name!r}\nrunpy.run_module({name!r}, run_name='__main__')"


def one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2, done.stderr
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr


ENGINE, SERVICE = "gyre_backend.engines.embedded", "gyre_backend.service"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        (ENGINE, ["--model", "nosuch"], "unknown model 'nosuch'"),
        (SERVICE, ["--config", "nosuch.toml", "--run-dir", "r"], "no such file"),
        (SERVICE, ["--config", "key.toml", "--run-dir", "r"], "train.stepps"),
        (SERVICE, ["--config", "model.toml", "--run-dir", "r"], "unknown model 'nosuch'"),
        (SERVICE, ["--config", "preset.toml", "--run-dir", "r"], "scheduler.preset"),
    ],
)
def test_wrong_settings(tmp_path: Path, name: str, arguments: Sequence[str], says: str) -> None:
    (tmp_path / "key.toml").write_text("[train]\nstepps = 3\n")
    (tmp_path / "model.toml").write_text('[model]\npath = "nosuch"\n')
    (tmp_path / "preset.toml").write_text('[scheduler]\npreset = "nosuch"\n')
    one_line(run(module(name), *arguments, cwd=tmp_path), says)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    from gyre_backend.models import tiny_dir

    model = tiny_dir(tmp_path / "tiny")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        one_line(run(module(ENGINE), "--model", str(model), "--port", port, cwd=tmp_path), f"127.0.0.1:{port}")


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    done = run(BLOCK_TORCH + module(ENGINE), "--model", "m", cwd=tmp_path)
    one_line(done, "pip install 'gyre[backend]'")
