"""A pytest plug-in for grading: no test may hang, and what code under test does to the process at exit does not reach the report.

Loaded by name from a read-only folder; it is not part of Gyre's import tree.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT_S = int(os.environ.get("GYRE_TEST_LIMIT_S", "60"))


def pytest_configure(config: pytest.Config) -> None:
    """One test more, that must fail: a run in which it doesn't is falsified."""
    config.args.append(os.environ["GYRE_CANARY"])


class TestTookTooLong(Exception):
    """One test ran into its limit."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TestTookTooLong(f"no test may take longer than {LIMIT_S} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # After the JUnit file is written: leave at once, so that no exit handler of the code under test can rewrite it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
