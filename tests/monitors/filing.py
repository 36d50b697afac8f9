"""A monitor that files what it is told, for tests that look from another process."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gyre_backend.monitors import RunFacts


class Filing:
    """Writes RUN/filed.jsonl: steps, then `"closed"`."""

    def __init__(self, facts: RunFacts) -> None:
        self._path = facts.run_dir / "filed.jsonl"

    def step(self, number: int, at: float, values: Mapping[str, float]) -> None:
        self._write([number, at, dict(values)])

    def close(self) -> None:
        self._write("closed")

    def _write(self, what: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")
