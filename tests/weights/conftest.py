"""Sources in processes of their own; a Mooncake time-out short enough for tests."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gyre_backend.weights import Manifest, Region, region_of_array

os.environ["MC_TRANSFER_TIMEOUT"] = "5"
os.environ.setdefault("GLOG_minloglevel", "3")
SOURCE = Path(__file__).with_name("source.py")


class Source:
    """One source process."""

    def __init__(self, kind: str, folder: Path, size: int, count: int, delta: bool) -> None:
        arguments = [kind, str(folder), str(size), str(count), "1" if delta else "0"]
        self.process = subprocess.Popen(
            [sys.executable, str(SOURCE), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=SOURCE.parents[2],
            env={**os.environ, "PYTHONPATH": str(SOURCE.parents[2])},
        )

    def ask(self, command: str) -> dict[str, str]:
        """Send a command, wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the source has ended")

    def publish(self, version: int) -> Manifest:
        """Publish, and get the manifest."""
        return Manifest.from_bytes(base64.b64decode(self.ask(f"publish {version}")["manifest"]))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Callable[..., Source]]:
    """Starts sources: source(kind, size=, count=, delta=)."""
    started: list[Source] = []

    def start(kind: str, *, size: int = 1 << 20, count: int = 3, delta: bool = False) -> Source:
        started.append(Source(kind, tmp_path / "snapshots", size, count, delta))
        return started[-1]

    yield start
    for one in started:
        one.close()


def local_regions(manifest: Manifest) -> list[Region]:
    """Zeroed buffers in the manifest's layout."""
    return [region_of_array(entry.name, np.zeros(entry.shape, dtype=entry.dtype)) for entry in manifest.entries]
