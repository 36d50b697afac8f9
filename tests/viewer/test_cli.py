"""`gyre view`: what it takes, and what it says when that is wrong."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from gyre_sdk.cli.view import _target, view
from gyre_sdk.errors import ConfigError
from tests.viewer.conftest import EDGES


def test_runs_executions_and_logs_are_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_RUNS", str(run.parent))
    folder = run / "executions" / EDGES
    assert _target(str(run)) == (run.resolve(), "")
    assert _target("") == (run.resolve(), "")
    for name in (EDGES, EDGES[:9], str(folder), str(folder / "wal.gyre")):
        assert _target(name) == (run.resolve(), EDGES)


def test_users_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    stray = tmp_path / "wal.gyre"
    stray.write_bytes((run / "executions" / EDGES / "wal.gyre").read_bytes())
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for call, words in (
            (lambda: view(str(tmp_path / "nowhere")), "no execution"),
            (lambda: view(str(stray)), "gyre graph"),
            (lambda: view(str(run), model=tmp_path), "tokenizer.json"),
            (lambda: view(str(run), port=port, browser=False), f"127.0.0.1:{port}"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)) as caught:
                call()
            assert "\n" not in str(caught.value)


def test_another_address_is_served_behind_a_token_only(run: Path) -> None:
    command = [sys.executable, "-c", "from gyre_sdk.cli import main; main()", "view", str(run)]
    with subprocess.Popen([*command, "--host", "0.0.0.0", "--no-browser"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            found = re.search(r"http://0\.0\.0\.0:(\d+)/\?token=(\S+)", child.stdout.readline())
            assert found is not None
            url, token = f"http://127.0.0.1:{found[1]}/api/run", found[2]
            assert len(token) >= 32
            with httpx.Client(headers={"host": "box.example"}, timeout=30) as client:
                assert client.get(url).status_code == 401
                assert len(client.get(url, headers={"authorization": f"Bearer {token}"}).json()["executions"]) == 18
        finally:
            child.terminate()
        assert child.wait(20) == 0
