"""Orders to runners: numbered, on disk before anyone reads them, served by long poll. One runner at a
time.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Sequence
from typing import Any

from gyre_backend.config import TrainTable
from gyre_backend.ledger import Ledger
from gyre_sdk.errors import ConfigError

MAX_WAIT_S = 60.0


class OrderBook:
    """Dispatches groups of executions of the tasks that the runner offers."""

    def __init__(self, ledger: Ledger, table: TrainTable) -> None:
        self._ledger = ledger
        self._table = table
        self._news = asyncio.Event()
        self.registered = asyncio.Event()
        self._runner: dict[str, Any] = {}
        self._floor = self._last_read = -1
        stored = ledger.get_meta("runner")
        if stored is not None:
            self._runner = json.loads(stored)
            self._floor = int(self._runner["floor"])
            self.registered.set()

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that are trained on."""
        return list(self._runner.get("tasks", []))

    @property
    def slots(self) -> int:
        """Executions that the runner runs at once."""
        return int(self._runner.get("slots", 0))

    def hello(self, runner: str, tasks: Sequence[str], slots: int, harness: str) -> bool:
        """Register a runner. True when it takes over from another: what that one was running is lost.

        Raises ConfigError when none of the wanted tasks is offered.
        """
        wanted = [name for name in tasks if not self._table.tasks or name in self._table.tasks]
        missing = sorted(set(self._table.tasks) - set(tasks))
        if missing:
            raise ConfigError(f"train.tasks names tasks that the runner does not offer: {', '.join(missing)}")
        if not wanted:
            raise ConfigError("the runner offers no tasks")
        if slots < 1:
            raise ConfigError(f"a runner needs at least one slot, not {slots}")
        takes_over = bool(self._runner) and self._runner["runner"] != runner
        if not self._runner or takes_over:
            self._floor = self._ledger.last_order()
        self._runner = {"runner": runner, "tasks": wanted, "slots": slots, "harness": harness, "floor": self._floor}
        self._ledger.set_meta("runner", json.dumps(self._runner))
        self.registered.set()
        return takes_over

    def dispatch_group(self, version: int) -> str:
        """Order one more group; returns its id."""
        number = self._ledger.num_groups()
        group, task = f"g{number:06d}", self._task(number)
        executions = [secrets.token_hex(6) for _ in range(self._table.group_size)]
        order = {"kind": "group", "group": group, "task": task, "executions": executions, "purpose": "train"}
        self._ledger.dispatch(group, task, executions, version, 0, order)
        self._wake()
        return group

    def _task(self, number: int) -> str:
        tasks = self.tasks
        turn, place = divmod(number, len(tasks))
        if self._table.task_order == "shuffle":
            tasks = sorted(tasks)
            random.Random(f"{self._table.seed}:{turn}").shuffle(tasks)
        return tasks[place]

    def cancel(self, execution: str) -> None:
        """Tell the runner to stop one execution."""
        self._ledger.order({"kind": "cancel", "execution": execution})
        self._wake()

    def stop(self, reason: str) -> None:
        """Tell the runner that this run is over."""
        self._ledger.order({"kind": "stop", "reason": reason})
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def all_read(self, timeout_s: float) -> None:
        """Until the runner has asked for the newest order, or the time is over."""
        newest, clock = self._ledger.last_order(), asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self._last_read < newest and clock() < deadline:  # noqa: ASYNC110 - it changes in a request
            await asyncio.sleep(0.05)

    async def after(self, number: int, wait_s: float) -> list[dict[str, Any]]:
        """Orders above `number` (and of this runner's time); waits up to `wait_s` for the first."""
        deadline = asyncio.get_running_loop().time() + min(max(wait_s, 0.0), MAX_WAIT_S)
        while True:
            news = self._news
            found = self._ledger.orders_after(max(number, self._floor))
            if found:
                self._last_read = max(self._last_read, int(found[-1]["order"]))
            left = deadline - asyncio.get_running_loop().time()
            if found or left <= 0:
                return found
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                return []
