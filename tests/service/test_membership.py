"""One step with cells that join late, leave early, hang, lie and die at random moments: the gradient is the one of a cell alone.

The step, the leases, the replicas and the transports are the real ones; only the HTTP between service and cell is not there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gyre_backend.algorithms import make  # noqa: E402
from gyre_backend.cells.client import CellRefused  # noqa: E402
from gyre_backend.cells.replica import Replica  # noqa: E402
from gyre_backend.errors import CellError  # noqa: E402
from gyre_backend.models import tiny_dir  # noqa: E402
from gyre_backend.service.closing import gather_gradients  # noqa: E402
from gyre_backend.service.fleet import Cell  # noqa: E402
from gyre_backend.service.groups import PreparedGroup  # noqa: E402
from gyre_backend.service.steps import OpenStep  # noqa: E402
from gyre_backend.trainers.base import TrainerConfig  # noqa: E402
from gyre_backend.trainers.hf import HFTrainer  # noqa: E402
from gyre_backend.tree.plan import plan_from_bytes, plan_to_bytes  # noqa: E402
from gyre_backend.weights import FileTransport, Manifest  # noqa: E402
from gyre_sdk.errors import GyreError  # noqa: E402
from tests.cells.plans import random_plan  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
MICROS, EVENTS = 8, 10


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model") / "tiny", hidden=16, layers=1)


@pytest.fixture
def make_replica(model_folder: Path, tmp_path: Path) -> Callable[..., Replica]:
    def build(name: str, exact: bool) -> Replica:
        trainer = HFTrainer(model_folder, TrainerConfig(dtype="float64", lr=1e-2), make("grpo"))
        return Replica(trainer, FileTransport(tmp_path / name), exact_sum=exact)

    return build


class Client:
    """A cell's client whose cell is a replica in this process, slow, and now and then dead, hung or lying."""

    def __init__(self, replica: Replica, draw: random.Random, slowness: int) -> None:
        self.replica, self.draw, self.slowness = replica, draw, slowness
        self.dead = self.lies = False
        self.hung = asyncio.Event()
        self.lock = asyncio.Lock()

    async def _do(self, work: Callable[[], Any]) -> Any:
        async with self.lock:
            for _ in range(self.draw.randrange(self.slowness)):
                await asyncio.sleep(0)
            if self.hung.is_set():
                await asyncio.sleep(3600)
            if self.dead:
                raise CellError("it is dead")
            try:
                return work()
            except GyreError as error:
                raise CellRefused(str(error)) from error

    async def pull(self, manifest: Manifest) -> Any:
        return await self._do(lambda: self.replica.pull_weights(manifest))

    async def publish(self) -> Any:
        return await self._do(self.replica.publish_weights)

    async def begin(self, step: int, epoch: int, *, keep: bool = False) -> None:
        await self._do(lambda: self.replica.begin(step, epoch, keep=keep))

    async def micro(self, micro: int, epoch: int, plan: bytes) -> Any:
        return await self._do(lambda: self.replica.micro(micro, epoch, plan_from_bytes(plan)))

    async def gradients(self, epoch: int, micros: Sequence[int]) -> Any:
        manifest = await self._do(lambda: self.replica.publish_gradients(epoch, micros))
        if not self.lies:
            return manifest
        entry = manifest.entries[0]
        return msgspec.structs.replace(
            manifest, entries=(msgspec.structs.replace(entry, chunks=bytes(len(entry.chunks))), *manifest.entries[1:])
        )

    async def add(self, manifest: Manifest, micros: Sequence[int]) -> Any:
        return await self._do(lambda: self.replica.add_gradients(manifest, list(micros)))


class World:
    """A fleet of three: what fails is lost a little later, as by the service's watch, and may be replaced."""

    def __init__(self, build: Callable[..., Replica], exact: bool, seed: int) -> None:
        self.build, self.exact = build, exact
        self.draw = random.Random(seed)
        self.cells = [Cell(index) for index in range(3)]
        self.made = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.training = {0}
        self.metrics = SimpleNamespace(event=lambda *_, **__: None)
        for index in range(3):
            self.replace(index)
        self.step = OpenStep(0, self, lambda: None)  # type: ignore[arg-type]

    fleet = property(lambda self: self)
    core = property(lambda self: self.cells[0])

    def replace(self, index: int) -> None:
        cell = self.cells[index]
        self.made += 1
        cell.client = Client(self.build(f"{index}-{self.made}", self.exact), self.draw, 6 if index else 40)  # type: ignore[assignment]
        cell.version, cell.failing = 0, ""

    def fail(self, index: int, why: str) -> None:
        cell = self.cells[index]
        assert index, f"the core was failed: {why}"
        if not cell.failing:
            cell.failing = why
            self.tasks.append(asyncio.create_task(self._lose(cell)))

    async def _lose(self, cell: Cell) -> None:
        for _ in range(self.draw.randrange(20)):
            await asyncio.sleep(0)
        cell.client = None
        self.training.discard(cell.index)
        self.step.drop(cell)
        self.replace(cell.index)

    async def disturb(self) -> None:
        """One random thing that happens to a satellite."""
        cell = self.cells[self.draw.choice((1, 2))]
        client: Any = cell.client
        if not cell.up:
            return
        kind = self.draw.choice(("join", "join", "join", "leave", "die", "hang", "lie"))
        try:
            if kind == "join":
                self.training.add(cell.index)
                await self.step.join(cell)
            elif kind == "leave" and cell.index in self.training:
                self.training.discard(cell.index)
                await self.step.leave(cell)
            elif kind == "die":
                client.dead = True
                self.fail(cell.index, "killed")
            elif kind == "hang":
                client.hung.set()
                self.fail(cell.index, "no answer")
            elif kind == "lie":
                client.lies = True
        except CellError as error:
            self.step.drop(cell)
            self.fail(cell.index, str(error))


async def one_step(world: World) -> None:
    """As the driver does it: begin, assign, disturbances, gather until everything is there."""
    step = world.step
    await step.join(world.core)
    step.snapshot = await world.core.ask().publish()
    groups = [
        PreparedGroup(
            group=f"g{n}", micros=(plan_to_bytes(random_plan(n)),), micro_tokens=(18,), num_executions=2, rewards=(),
            tokens=18, flat_tokens=18, edges=20, version_sum=0, oldest_version=0, counters={},
        )
        for n in range(MICROS)
    ]  # fmt: skip
    step.assign(groups[: MICROS // 2])
    pending = [asyncio.create_task(_disturbances(world))]
    step.assign(groups[MICROS // 2 :])
    for _ in range(1000):
        while len(step.trained()) < MICROS:
            await asyncio.sleep(0)
            assert step.failure is None
        if await gather_gradients(world, step):  # type: ignore[arg-type]
            break
    assert step.all_collected()
    step.close()
    for task in [*pending, *world.tasks]:
        task.cancel()
    await asyncio.gather(*pending, *world.tasks, return_exceptions=True)


async def _disturbances(world: World) -> None:
    for _ in range(EVENTS):
        for _ in range(world.draw.randrange(12)):
            await asyncio.sleep(0)
        # A disturbance that hangs with its cell holds nothing else up.
        world.tasks.append(asyncio.create_task(world.disturb()))


@pytest.mark.parametrize("exact", [True, False])
async def test_whatever_happens_to_satellites(make_replica: Callable[..., Replica], exact: bool) -> None:
    alone = make_replica("alone", exact)
    alone.begin(0, 1)
    for number in range(MICROS):
        alone.micro(number, 1, random_plan(number))
    alone.optimizer_step(2 * MICROS, range(MICROS))
    shared = lost = 0
    for seed in range(10):
        world = World(make_replica, exact, seed)
        await one_step(world)
        owners = world.step.book.owners()
        assert sorted(owners) == sorted(world.step.results) == list(range(MICROS))
        core: Any = world.core.ask()
        core.replica.optimizer_step(2 * MICROS, sorted(owners))
        shared += len(set(owners.values())) > 1
        lost += world.step.book.lost
        if exact:
            assert core.replica.publish_weights().digest == alone.publish_weights().digest, seed
        for got, want in zip(core.replica.trainer.named_weights(), alone.trainer.named_weights(), strict=True):
            np.testing.assert_allclose(got.tensor.detach(), want.tensor.detach(), rtol=0, atol=1e-12)
    assert shared >= 5, "satellites hardly took part"
    assert lost >= 5, "hardly anything was lost"
