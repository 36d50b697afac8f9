"""Replicas exchange weights and gradients: whoever computed what, the step is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gyre_backend.algorithms import make  # noqa: E402
from gyre_backend.cells.replica import Replica  # noqa: E402
from gyre_backend.errors import CellError, WeightsError  # noqa: E402
from gyre_backend.models import tiny_dir  # noqa: E402
from gyre_backend.trainers.base import TrainerConfig  # noqa: E402
from gyre_backend.trainers.hf import HFTrainer  # noqa: E402
from gyre_backend.tree.plan import TreePlan  # noqa: E402
from gyre_backend.weights import FileTransport  # noqa: E402
from tests.cells.plans import random_plan  # noqa: E402

Make = Callable[..., Replica]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=1)


@pytest.fixture
def make_replica(model_folder: Path, tmp_path: Path) -> Make:
    def build(name: str, *, exact: bool = False, dtype: str = "float64") -> Replica:
        config = TrainerConfig(dtype=dtype, lr=1e-2)
        trainer = HFTrainer(model_folder, config, make("grpo"))
        return Replica(trainer, FileTransport(tmp_path / name), exact_sum=exact)

    return build


def weights(replica: Replica) -> list[np.ndarray]:
    return [b.tensor.detach().clone().numpy() for b in replica.trainer.named_weights()]


def run_steps(cells: Sequence[Replica], owners: Sequence[Sequence[int]], plans: Sequence[TreePlan]) -> list[float]:
    """One optimizer step per row of `owners` (micro-step -> cell); returns the losses. Cell 0 is the core."""
    losses = []
    for step, row in enumerate(owners):
        snapshot = cells[0].publish_weights()
        for cell in cells[1:]:
            cell.pull_weights(snapshot)
        for cell in cells:
            cell.begin(step, 1)
        losses.append(sum(cells[owner].micro(number, 1, plans[number]).loss for number, owner in enumerate(row)))
        for index, cell in enumerate(cells[1:], 1):
            mine = [number for number, owner in enumerate(row) if owner == index]
            if mine:
                cells[0].add_gradients(cell.publish_gradients(1, mine), mine)
        cells[0].optimizer_step(8, range(len(row)))
    return losses


OWNERS = [
    [[0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]],
    [[1, 1, 1, 1, 1, 1], [0, 2, 0, 2, 0, 2], [2, 1, 0, 2, 1, 0]],
]


@pytest.mark.parametrize("owners", OWNERS)
def test_three_cells_equal_one_in_float64(make_replica: Make, owners: list[list[int]]) -> None:
    plans = [random_plan(seed) for seed in range(6)]
    alone = make_replica("alone")
    expected = run_steps([alone], [[0] * 6] * 3, plans)
    cells = [make_replica(f"cell{i}") for i in range(3)]
    losses = run_steps(cells, owners, plans)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
    for got, want in zip(weights(cells[0]), weights(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)
    assert expected[0] != expected[-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_sum_is_bit_identical_whatever_the_membership(make_replica: Make, dtype: str) -> None:
    plans = [random_plan(seed) for seed in range(6)]
    alone = make_replica("alone", exact=True, dtype=dtype)
    run_steps([alone], [[0] * 6] * 3, plans)
    for number, owners in enumerate(OWNERS):
        cells = [make_replica(f"{number}-{i}", exact=True, dtype=dtype) for i in range(3)]
        run_steps(cells, owners, plans)
        assert cells[0].publish_weights().digest == alone.publish_weights().digest


def test_a_lying_satellite_adds_nothing(make_replica: Make) -> None:
    core, liar = make_replica("core"), make_replica("liar")
    for cell in (core, liar):
        cell.begin(0, 1)
    core.micro(0, 1, random_plan(0))
    liar.micro(1, 1, random_plan(1))
    before = [b.tensor.clone() for b in core.trainer.named_grads()]
    manifest = liar.publish_gradients(1, [1])
    entry = manifest.entries[-1]
    forged = msgspec.structs.replace(entry, chunks=bytes(len(entry.chunks)))
    with pytest.raises(WeightsError, match="digest"):
        core.add_gradients(msgspec.structs.replace(manifest, entries=(*manifest.entries[:-1], forged)), [1])
    with pytest.raises(WeightsError, match="step"):
        core.add_gradients(msgspec.structs.replace(manifest, version=5), [1])
    for buffer, want in zip(core.trainer.named_grads(), before, strict=True):
        assert torch.equal(buffer.tensor, want)
    core.add_gradients(manifest, [1])
    with pytest.raises(CellError, match="counted already"):
        core.add_gradients(manifest, [1])


def test_epochs_fence_off_what_is_late(make_replica: Make) -> None:
    cell = make_replica("cell")
    with pytest.raises(CellError, match="holds version 0"):
        cell.begin(3, 1)
    cell.begin(0, 1)
    cell.micro(0, 1, random_plan(0))
    with pytest.raises(CellError, match="already"):
        cell.micro(0, 1, random_plan(0))
    with pytest.raises(CellError, match="epoch"):
        cell.micro(1, 2, random_plan(1))
    with pytest.raises(CellError, match="not what was asked for"):
        cell.publish_gradients(1, [0, 1])
    cell.publish_gradients(1, [0])
    with pytest.raises(CellError, match="frozen"):
        cell.micro(1, 1, random_plan(1))
    cell.begin(0, 2)
    assert all(not b.tensor.any() for b in cell.trainer.named_grads())


def test_the_core_keeps_its_gradient_over_a_visit_to_rollout(make_replica: Make) -> None:
    straight, visiting = make_replica("a"), make_replica("b")
    for core in (straight, visiting):
        core.begin(0, 1)
        core.micro(0, 1, random_plan(0))
    visiting.begin(0, 2, keep=True)
    straight.micro(1, 1, random_plan(1))
    visiting.micro(1, 2, random_plan(1))
    with pytest.raises(CellError, match="holds micro-steps"):
        visiting.optimizer_step(4, [0])
    for core in (straight, visiting):
        core.optimizer_step(4, [0, 1])
    assert straight.publish_weights().digest == visiting.publish_weights().digest


def test_failed_pull_leaves_no_version(make_replica: Make) -> None:
    core, satellite = make_replica("core"), make_replica("satellite")
    manifest = core.publish_weights()
    entry = manifest.entries[0]
    forged = msgspec.structs.replace(entry, chunks=bytes(len(entry.chunks)))
    with pytest.raises(WeightsError):
        satellite.pull_weights(msgspec.structs.replace(manifest, entries=(forged, *manifest.entries[1:])))
    assert satellite.version == -1
    with pytest.raises(CellError):
        satellite.begin(0, 1)
    with pytest.raises(CellError, match="not whole"):
        satellite.publish_weights()
    assert satellite.pull_weights(manifest).version == 0
    satellite.begin(0, 1)


def test_checkpoint_resumes_exactly(make_replica: Make, tmp_path: Path) -> None:
    plans = [random_plan(seed) for seed in range(4)]
    first = make_replica("a")
    run_steps([first], [[0] * 4], plans)
    digest = first.save(tmp_path / "checkpoint")
    second = make_replica("b")
    second.load(tmp_path / "checkpoint")
    assert second.publish_weights().digest == digest
    for cell in (first, second):
        cell.begin(1, 1)
        cell.micro(0, 1, plans[0])
        cell.optimizer_step(4, [0])
    assert first.publish_weights().digest == second.publish_weights().digest
