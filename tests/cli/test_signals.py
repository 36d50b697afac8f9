"""SIGINT and SIGTERM end a run in order: sealed logs, no sandbox and no process left, exit code 130; also for a run that a shell
started in the background, with SIGINT ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre_sdk.graph.loading import load_graph
from gyre_sdk.harness.records import wal_paths

NAP = str(10**6 + os.getpid())
"""Seconds: a command line that only this process's tests start."""
SLOW_SOLUTION = f"setsid nohup sleep {NAP} >/dev/null 2>&1 &\nsleep {NAP}\n"


def write_task(folder: Path) -> None:
    for name in ("tests", "solution", "environment"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text('schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n')
    (folder / "instruction.md").write_text("wait\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "solution" / "solve.sh").write_text(SLOW_SOLUTION)


def sleepers() -> set[str]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.read_bytes() == f"sleep\0{NAP}\0".encode():
                found.add(entry.parent.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("background", [False, True])
def test_a_signal_ends_a_run_in_order(tmp_path: Path, number: signal.Signals, background: bool) -> None:
    write_task(tmp_path / "wait")
    before = sleepers()
    command = [sys.executable, "-c", "from gyre_sdk.cli import main; main()", "run", "-t", "wait", "-a", "oracle"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if background else None,
    )
    try:
        deadline = time.monotonic() + 60
        while len(sleepers() - before) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    assert sleepers() <= before
    (log,) = wal_paths(tmp_path / "run")
    outcome = load_graph(log).graph.outcome
    assert outcome is not None
    assert outcome.status == "cancelled"
    solution = tmp_path / "wait" / "solution" / "solve.sh"
    solution.write_text("true\n")
    again = subprocess.run(
        [*command, "--run-dir", "run", "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 0, again.stderr
    assert len(wal_paths(tmp_path / "run")) == 2, "the stopped one is kept, and run again as a new one"
