"""The pool: no more than `slots` at once, every order ends exactly once, cancelling one leaves the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.pool import PLAN_FILE, Pool, load_or_make_plan, plan_groups
from gyre_sdk.harness.runner import ExecutionOrder, Runner
from gyre_sdk.wire.records import Outcome

pytestmark = pytest.mark.anyio


@dataclass
class CountingRunner:
    """Stands in for a Runner: sleeps a little and counts who runs at the same time."""

    running: int = 0
    most: int = 0

    async def run(self, order: ExecutionOrder) -> Outcome:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await anyio.sleep(10 if order.group == "slow" else 0.01)
        finally:
            self.running -= 1
        return Outcome(status="completed", reward=1.0, valid=True)


def orders(count: int, group: str = "g") -> list[ExecutionOrder]:
    task = cast(Any, SimpleNamespace(name="t"))
    return [ExecutionOrder(f"{number:012x}", group, task) for number in range(count)]


@pytest.mark.parametrize("slots", [1, 3, 50])
async def test_slots_bound_what_runs_and_everything_ends_once(slots: int) -> None:
    runner = CountingRunner()
    done = [one async for one in Pool(cast(Runner, runner), slots).run_all(orders(20))]
    assert sorted(one.order.execution for one in done) == [f"{n:012x}" for n in range(20)]
    assert runner.most == min(slots, 20)


async def test_cancel_ends_one_execution_and_not_the_others() -> None:
    pool = Pool(cast(Runner, CountingRunner()), 4)
    slow = ExecutionOrder("f" * 12, "slow", orders(1)[0].task)
    results = []

    async def collect(order: ExecutionOrder) -> None:
        results.append(await pool.run_one(order))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(collect, slow)
            group.start_soon(collect, orders(1)[0])
            await anyio.sleep(0.05)
            assert pool.cancel(slow.execution)
            assert not pool.cancel("0" * 11 + "9")
    statuses = {one.order.execution: one.outcome.status for one in results}
    assert statuses == {slow.execution: "cancelled", "0" * 12: "completed"}


def test_no_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="slots"):
        Pool(cast(Runner, CountingRunner()), 0)


def test_a_plan_is_written_once_and_resumed(tmp_path: Path) -> None:
    tasks = cast(Any, [SimpleNamespace(name="a"), SimpleNamespace(name="b")])
    plan = load_or_make_plan(tmp_path, lambda: plan_groups(tasks, 3), resume=False)
    assert len({line.execution for line in plan}) == 6
    assert [line.task for line in plan] == ["a", "a", "a", "b", "b", "b"]
    assert len({line.group for line in plan}) == 2
    assert load_or_make_plan(tmp_path, lambda: pytest.fail("made again"), resume=True) == plan
    with pytest.raises(ConfigError, match="holds a run already"):
        load_or_make_plan(tmp_path, list, resume=False)
    (tmp_path / PLAN_FILE).write_text("[1]")
    with pytest.raises(ConfigError, match=r"plan\.json can't be read"):
        load_or_make_plan(tmp_path, list, resume=True)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        load_or_make_plan(tmp_path, list, resume=True)
