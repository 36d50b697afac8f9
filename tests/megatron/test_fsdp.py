"""FSDP2 on two gloo ranks: the same numbers as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from forests import make_path
from test_linear_layers import save_hybrid
from test_megatron_trainer import grads_of, publishes_bitwise, resumes_bitwise, weights_of
from tiny_models import forest, relative, save_model

from gyre_backend.algorithms import make
from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers.base import TrainerConfig, create
from gyre_backend.tree.plan import build_plan, flatten_plan

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2, "logits_chunk": 16}


def pair(folder: Path, algorithm: str = "grpo", *, kl: float = 0.0, **changes):
    """The hf trainer, and the same as fsdp on two ranks."""
    hf = TrainerConfig(dtype="float64", **SETTINGS | changes)
    fsdp = TrainerConfig(trainer="fsdp", dtype="float64", **SETTINGS | changes)
    return create(hf, folder, make(algorithm, kl=kl)), create(fsdp, folder, make(algorithm, kl=kl))


@pytest.mark.megatron
@pytest.mark.timeout(400)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_ranks_train_to_the_same_weights(checkpointing: bool, tmp_path) -> None:
    hf, sharded = pair(save_model(tmp_path / "m", "qwen3"), gradient_checkpointing=checkpointing)
    with sharded:
        wanted, wanted_grads = grads_of(hf, flatten_plan(forest()))
        result, grads = grads_of(sharded, forest())
        assert relative(grads, wanted_grads) <= 1e-12
        assert abs(result.loss - wanted.loss) <= 1e-12
        for step in range(5):
            for plan in (forest(step), forest(step + 100)):
                hf.forward_backward(flatten_plan(plan))
                sharded.forward_backward(plan)
            found, expected = sharded.optimizer_step(6), hf.optimizer_step(6)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10)
        found, expected = weights_of(sharded), weights_of(hf)
        assert max(float((found[k] - expected[k]).abs().max()) for k in found) <= 1e-10
        resumes_bitwise(sharded, tmp_path)
        publishes_bitwise(sharded, tmp_path)


@pytest.mark.megatron
@pytest.mark.timeout(400)
def test_a_rank_without_work_waits_along(tmp_path) -> None:
    """A single trained token can't be shared out."""
    plan = build_plan([make_path("e0", [1, 2, 3], [-1, -1, 0])], {"e0": 1.0})
    hf, sharded = pair(save_model(tmp_path, "llama"))
    with sharded:
        wanted, wanted_grads = grads_of(hf, plan)
        result, grads = grads_of(sharded, plan)
    assert result.loss == pytest.approx(wanted.loss, abs=1e-12)
    assert relative(grads, wanted_grads) <= 1e-12


@pytest.mark.megatron
@pytest.mark.timeout(400)
def test_gated_delta_net_layers_and_a_reference_are_sharded_too(tmp_path) -> None:
    reference = save_hybrid(tmp_path / "reference", "qwen3_5", seed=1)
    hf, sharded = pair(save_hybrid(tmp_path / "m", "qwen3_5"), "gspo", kl=0.1, ref_model=str(reference))
    with sharded:
        _, wanted = grads_of(hf, flatten_plan(forest()))
        _, found = grads_of(sharded, forest())
    assert relative(found, wanted) <= 1e-12


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"options": {"tp": 2}}, "fsdp trainer"),
        ({"options": {"ranks": 0}}, "ranks"),
        ({"bounded_memory": True}, "bounded_memory"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_fsdp_refuses_by_name(tmp_path, settings: dict, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        create(TrainerConfig(trainer="fsdp", **settings), tmp_path, make("grpo"))
