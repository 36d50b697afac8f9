"""A long run that was stopped goes on where it was: what passed is noted in the file $GYRE_RESUME, and left out the next time.

A note holds only for the sources it was made with. Several processes may write at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SOURCES = ("gyre_sdk/environments", "tests/environments")
_PASSED = pytest.StashKey[bool]()


def _file() -> Path | None:
    named = os.environ.get("GYRE_RESUME")
    return Path(named).resolve() if named else None


@cache
def _digest() -> str:
    """Of everything that decides a result here."""
    sha = hashlib.sha256()
    for place in _SOURCES:
        for path in sorted((_ROOT / place).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                sha.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is noted."""
    file = _file()
    if file is None or not file.is_file():
        return
    noted = set(file.read_text().splitlines())
    done = [item for item in items if f"{_digest()} {item.nodeid}" in noted]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note a test when its call and its clean-up passed."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    file = _file()
    if report.when == "teardown" and report.passed and item.stash.get(_PASSED, False) and file is not None:
        with file.open("a") as out:
            out.write(f"{_digest()} {item.nodeid}\n")
