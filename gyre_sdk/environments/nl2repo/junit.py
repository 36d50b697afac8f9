"""Counting a JUnit report, the only thing that is believed of a test run."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.environments.sandbox.archive import read_regular

_LIMIT = 32 << 20


@dataclass(frozen=True, slots=True)
class Counts:
    """Test cases of one or more reports."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    canary_failed: int = 0
    """Runs of the test that must fail, and did."""
    canary_passed: int = 0
    """Runs of the test that must fail, and did not: something falsifies results."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.canary_failed + other.canary_failed,
            self.canary_passed + other.canary_passed,
        )


def count(path: Path, canary: str) -> Counts | None:
    """Counts of a report; None when there is none that can be read. Names that hold `canary` count apart."""
    data = read_regular(path, limit=_LIMIT)
    if data is None or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        return None
    try:
        root = ET.fromstring(data)
    except ET.ParseError:
        return None
    total = Counts()
    for case in root.iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        if canary in (case.get("name") or "") + (case.get("classname") or ""):
            total += Counts(canary_failed=int(bad), canary_passed=int(not bad))
        elif bad:
            total += Counts(failed=1)
        elif case.find("skipped") is not None:
            total += Counts(skipped=1)
        else:
            total += Counts(passed=1)
    return total
