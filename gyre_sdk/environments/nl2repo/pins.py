"""The sdist variant: which release of a package stands for a task, and how its tests are run. *Not* the benchmark's official score."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).parent / "pins.toml"
PYTEST = "pytest==8.4.1"


@dataclass(frozen=True, slots=True)
class Pin:
    """One package. Paths are relative to the root of the unpacked sdist."""

    task: str
    package: str
    version: str
    declared: int
    """Test cases that pass with the release's own code: the denominator."""
    packages: tuple[str, ...]
    """What the candidate must write: the only paths that are taken from it."""
    tests: tuple[str, ...]
    """Hidden paths: tests, with their data and configuration. Those whose name begins with `test` are what pytest is given."""
    requires: tuple[str, ...] = ()
    """Pinned requirements of the code and its tests; pytest's own pin is PYTEST unless named here."""
    plugins: tuple[str, ...] = ()
    """Pytest plugins to load by name: the automatic loading is off."""
    arguments: str = ""
    """More arguments for pytest."""

    @property
    def command(self) -> str:
        """How the tests are run."""
        named = " ".join(f"-p {name}" for name in self.plugins)
        targets = " ".join(path for path in self.tests if Path(path).name.startswith("test"))
        return " ".join(part for part in ("pytest", named, self.arguments, targets) if part)

    @property
    def environment(self) -> tuple[str, ...]:
        """Everything to install."""
        own = any(name.startswith("pytest==") for name in self.requires)
        return self.requires if own else (PYTEST, *self.requires)


@cache
def pins() -> dict[str, Pin]:
    """By the task's name in lower case."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    found = {}
    for task, entry in table.items():
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        found[task.lower()] = Pin(task=task, **fields)
    return found
