"""Freed memory is kept: a second allocation of the same size costs no page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from gyre_backend.trainers.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        held = [bytearray(b"x") * (24 << 20) for _ in range(3)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed_memory() and keep_freed_memory()
else:
    keep_freed_memory()
faults()
print(faults())
"""


def faults(mode: str, **env: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_kept_unless_the_environment_sets_malloc() -> None:
    pages = 2 * 3 * (24 << 20) // 4096
    assert faults("kept") < pages // 20
    assert faults("left", MALLOC_TRIM_THRESHOLD_="131072") > pages // 4
