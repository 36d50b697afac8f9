"""Whatever is killed, and however: nothing stays, at once or after the next start's sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_sdk.environments.sandbox import journal, sweep

RUNNER = """
import asyncio, sys
from gyre_sdk.environments.sandbox import Limits, SandboxSpec, create

async def main():
    sandbox = create(SandboxSpec(limits=Limits(memory_mb=256, pids=64, disk_mb=32)), sys.argv[1])
    await sandbox.start()
    await sandbox.exec("trap '' TERM; setsid sleep %s & (setsid sleep %s &) ; sleep 0.1" % (sys.argv[2], sys.argv[2]))
    print(sandbox.name, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class Victim:
    """A runner of its own, with one sandbox full of stubborn processes."""

    def __init__(self, backend: str, home: Path) -> None:
        self.tag = f"4{os.getpid()}{time.monotonic_ns() % 10000}"
        env = os.environ | {"GYRE_SANDBOXES": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, backend, self.tag], stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()
        self.entry = json.loads((home / "boxes" / self.name / "journal.json").read_text())
        self.home = home

    def pids(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) not in (os.getpid(), self.process.pid):
                try:
                    if self.tag in (folder / "cmdline").read_text().split("\0"):
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found

    def left(self) -> list[str]:
        """Everything of it that is still there."""
        left = [f"process {pid}" for pid in self.pids() if journal.start_time(pid) is not None]
        if (self.home / "boxes" / self.name).exists():
            left.append("folder")
        left += [group for group in self.entry["groups"] if Path(group).exists()]
        if self.name in Path("/proc/self/mounts").read_text():
            left.append("mount")
        return left


def _until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def victim(isolating: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    monkeypatch.setenv("GYRE_SANDBOXES", str(tmp_path / "sandboxes"))
    found = Victim(isolating, tmp_path / "sandboxes")
    assert len(found.pids()) == 2
    yield found
    found.process.kill()
    found.process.wait()
    assert found.process.stdout is not None
    found.process.stdout.close()
    for pid in found.pids():
        os.kill(pid, signal.SIGKILL)


def test_killing_the_runner_ends_everything_by_itself(victim: Victim) -> None:
    victim.process.kill()
    victim.process.wait()
    assert _until(lambda: victim.left() == []), victim.left()


def test_a_live_runner_is_never_swept(victim: Victim) -> None:
    assert sweep().boxes == []
    assert len(victim.pids()) == 2


def test_killing_runner_and_keeper_at_once_leaves_work_for_the_sweep_alone(victim: Victim) -> None:
    helpers = [int(pid) for pid in victim.entry["pids"] if int(pid) != victim.entry["owner"]]
    victim.process.send_signal(signal.SIGSTOP)
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    victim.process.kill()
    victim.process.wait()
    assert _until(lambda: not victim.pids()), "the init dies with its box, and the namespace with it"
    swept = sweep()
    assert victim.left() == []
    assert swept.left == []
    assert victim.name in swept.boxes


def test_an_entry_without_anything_behind_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that died between the entry and the start; and one from before a reboot, whose ids mean others now."""
    monkeypatch.setenv("GYRE_SANDBOXES", str(tmp_path))
    folder = journal.open_entry(f"box-{os.getuid()}-dead", "bwrap")
    entry = json.loads((folder / "journal.json").read_text())
    gone = subprocess.Popen(["true"])
    gone.wait()
    (folder / "journal.json").write_text(json.dumps(entry | {"owner": gone.pid, "pids": {str(gone.pid): 1}}))
    other = journal.open_entry(f"box-{os.getuid()}-boot", "bwrap")
    bystander = subprocess.Popen(["sleep", "30"])
    try:
        pids = {str(bystander.pid): journal.start_time(bystander.pid)}
        (other / "journal.json").write_text(json.dumps({"owner": 1, "boot": "before", "pids": pids, "groups": []}))
        assert sorted(sweep().boxes) == [f"box-{os.getuid()}-boot", f"box-{os.getuid()}-dead"]
        assert bystander.poll() is None
        assert list((tmp_path / "boxes").iterdir()) == []
    finally:
        bystander.kill()
        bystander.wait()
