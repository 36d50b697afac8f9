"""Room for what a sandbox writes: templates that many make at once, and machines without loop devices."""

from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gyre_sdk.environments.sandbox import disk

from .helpers import ORACLE, play


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4 here")
def test_a_template_made_by_many_threads_at_once_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "home", lambda: tmp_path)
    together = threading.Barrier(6)

    def make(_: int) -> Path:
        together.wait()
        return disk._template(8)

    with ThreadPoolExecutor(6) as threads:
        found = set(threads.map(make, range(6)))
    (image,) = found
    checked = subprocess.run(["e2fsck", "-fn", str(image)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert [path.name for path in image.parent.iterdir()] == [image.name]


@pytest.mark.anyio
async def test_an_image_with_a_user_of_its_own_where_loop_devices_do_not_work(
    best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "loop_works", lambda: False)
    outcome = await play("flaky", ORACLE, backend=best)
    assert (outcome.reward, outcome.valid) == (1.0, True), outcome
