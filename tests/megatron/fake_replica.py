"""A replica of nothing, for tests of the launcher: ranks of it start without a model or a process group."""

from __future__ import annotations

import os
import time
from typing import Any

from gyre_backend.errors import TrainingError


class Replica:
    """Answers with its number; fails, hangs or dies when told to."""

    def __init__(self, setup: Any) -> None:
        self.rank = int(os.environ["RANK"])
        if setup == "refuse":
            raise TrainingError(f"rank {self.rank} does not want to")

    def logprobs(self, what: Any) -> Any:
        if what == "number":
            return self.rank
        if what == "print":
            print("noise", flush=True)
        if what == "crash" and self.rank == 1:
            raise KeyError("crash")
        if what == "die" and self.rank == 1:
            os._exit(7)
        if what in ("die", "crash", "hang"):
            time.sleep(3600)
        return os.getpid()
