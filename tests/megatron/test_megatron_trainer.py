"""Megatron-core on gloo ranks: a tree trains to what its flattened paths train to, in every arrangement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import forest, relative, save_model

from gyre_backend.algorithms import make
from gyre_backend.errors import TrainingError
from gyre_backend.trainers.base import TrainerConfig, create
from gyre_backend.tree.plan import flatten_plan

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(400)]
STEPS = 5
EXACT = 1e-12


def trainer_of(folder: Path, algorithm: str = "grpo", dtype: str = "float64", **options):
    settings = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2, "logits_chunk": 16}
    config = TrainerConfig(trainer="megatron", dtype=dtype, options=options, **settings)
    return create(config, folder, make(algorithm))


def grads_of(trainer, plan):
    """(result, gradient) of one plan; leaves no gradient behind."""
    result = trainer.forward_backward(plan)
    grads = {buffer.name: buffer.tensor.clone() for buffer in trainer.named_grads()}
    trainer.zero_grad()
    return result, grads


def weights_of(trainer):
    return {buffer.name: buffer.tensor.clone() for buffer in trainer.named_weights()}


def train(trainer, *, flat: bool):
    """Five steps of two plans each."""
    norms = []
    for step in range(STEPS):
        for seed in (step, step + 100):
            plan = forest(seed)
            trainer.forward_backward(flatten_plan(plan) if flat else plan)
        norms.append(trainer.optimizer_step(6).grad_norm)
    return norms


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def oracle(folder, tmp_path_factory):
    """One rank, flattened: (result, gradients, norms of five steps, weights after them). The same rank, as a tree, agrees."""
    start = tmp_path_factory.mktemp("start") / "checkpoint"
    with trainer_of(folder) as trainer:
        trainer.save(start)
        result, grads = grads_of(trainer, flatten_plan(forest()))
        wanted = result, grads, train(trainer, flat=True), weights_of(trainer)
        trainer.load(start)
        agrees(trainer, wanted)
    return wanted


def agrees(trainer, wanted) -> None:
    """A trainer at its first version: gradient, five steps, norms and weights."""
    flat_result, flat_grads, flat_norms, flat_weights = wanted
    result, grads = grads_of(trainer, forest())
    assert relative(grads, flat_grads) <= EXACT
    assert abs(result.loss - flat_result.loss) <= EXACT
    assert result.metrics == pytest.approx(flat_result.metrics, rel=1e-9, abs=1e-9)
    norms = train(trainer, flat=False)
    assert norms == pytest.approx(flat_norms, rel=1e-10)
    assert trainer.version == STEPS
    found = weights_of(trainer)
    assert max(float((found[k] - flat_weights[k]).abs().max()) for k in found) <= 1e-10


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"pp": 2, "micro_batches": 3},
        {"dp": 2, "recompute": "full"},
        {"dp": 2, "pp": 2, "distributed_optimizer": False, "recompute": "selective"},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_tree_equals_flatten_in_every_arrangement(folder, oracle, options: dict, tmp_path) -> None:
    with trainer_of(folder, **options) as trainer:
        agrees(trainer, oracle)
        resumes_bitwise(trainer, tmp_path)
        publishes_bitwise(trainer, tmp_path)


def resumes_bitwise(trainer, tmp_path: Path) -> None:
    def one_step():
        trainer.forward_backward(forest(7))
        trainer.optimizer_step(3)
        return weights_of(trainer)

    trainer.save(tmp_path / "checkpoint")
    wanted, version = one_step(), trainer.version
    one_step()
    trainer.load(tmp_path / "checkpoint")
    found = one_step()
    assert trainer.version == version
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def publishes_bitwise(trainer, tmp_path: Path) -> None:
    """Export → transformers; and weights written from outside come back out unchanged."""
    from transformers import AutoModelForCausalLM

    trainer.export_hf(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    held = weights_of(trainer)
    assert all(torch.equal(parameter, held[name]) for name, parameter in loaded.named_parameters())
    ids = torch.arange(11)[None]
    with torch.no_grad():
        # not bitwise: where a tensor begins in memory decides which kernel multiplies it
        assert torch.allclose(trainer.model(ids).logits, loaded.eval()(ids).logits, rtol=0, atol=1e-12)
    for buffer in trainer.named_weights():
        buffer.tensor.mul_(0.5)
    trainer.load_weights(41)
    trainer.export_hf(tmp_path / "export")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert trainer.version == 41
    assert all(torch.equal(parameter, held[name] * 0.5) for name, parameter in again.named_parameters())


@pytest.mark.parametrize(("kind", "tp"), [("qwen3", 1), ("llama3", 1), ("qwen2", 2)])
def test_same_losses_and_gradients_as_the_hf_trainer(kind: str, tp: int, tmp_path) -> None:
    """With a KL term against a reference policy, which both hold as a second model."""
    folder = save_model(tmp_path / "policy", kind)
    settings = {"dtype": "float64", "ref_model": str(save_model(tmp_path / "reference", kind, seed=1))}
    hf = create(TrainerConfig(**settings), folder, make("grpo", kl=0.1))
    wanted = hf.forward_backward(forest())
    config = TrainerConfig(trainer="megatron", options={"tp": tp}, **settings)
    with create(config, folder, make("grpo", kl=0.1)) as trainer:
        result, grads = grads_of(trainer, forest())
        assert torch.equal(trainer.logprobs(forest()), trainer.logprobs(forest()))
    assert [b.name for b in hf.named_weights()] == list(grads)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-9)
    assert result.metrics == pytest.approx(wanted.metrics, rel=1e-6, abs=1e-9)
    assert relative(grads, {b.name: b.tensor for b in hf.named_grads()}) <= 1e-9


def test_experts_without_aux_loss_are_exact(tmp_path) -> None:
    save_model(tmp_path, "qwen3_moe")
    with trainer_of(tmp_path, pp=2) as trainer:
        tree, grads = grads_of(trainer, forest())
        flat, flat_grads = grads_of(trainer, flatten_plan(forest()))
        assert abs(tree.loss - flat.loss) <= EXACT
        assert relative(grads, flat_grads) <= EXACT
        publishes_bitwise_experts(trainer, tmp_path)


def publishes_bitwise_experts(trainer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer.export_hf(tmp_path / "export")
    assert not hasattr(trainer, "model")
    wanted = load_file(tmp_path / "model.safetensors")
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_replies_stay_whole_for_gspo(folder) -> None:
    plan = forest(5)
    hf = create(TrainerConfig(dtype="float64"), folder, make("gspo"))
    wanted = hf.forward_backward(flatten_plan(plan))
    with trainer_of(folder, "gspo", dp=2) as trainer:
        result, grads = grads_of(trainer, plan)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-9)
    assert relative(grads, {b.name: b.tensor for b in hf.named_grads()}) <= 1e-9


def test_gradients_added_from_outside_count_and_other_checkpoints_are_refused(folder, tmp_path) -> None:
    """What a cell does with a satellite's gradients: adds them to the core's."""
    plan, other = forest(), forest(9)
    with trainer_of(folder, tp=2) as trainer:
        _, first = grads_of(trainer, plan)
        _, second = grads_of(trainer, other)
        trainer.forward_backward(plan)
        for buffer in trainer.named_grads():
            buffer.tensor.add_(second[buffer.name])
        trainer.forward_backward(other)
        both = {b.name: b.tensor.clone() for b in trainer.named_grads()}
        assert relative(both, {k: first[k] + 2 * second[k] for k in first}) <= EXACT
        norm = trainer.optimizer_step(4).grad_norm
        assert norm == pytest.approx(sum(float((g / 4).square().sum()) for g in both.values()) ** 0.5, rel=1e-12)
        trainer.save(tmp_path / "checkpoint")
        text = (tmp_path / "checkpoint" / "trainer.json").read_text()
        (tmp_path / "checkpoint" / "trainer.json").write_text(text.replace('"tp": 2', '"tp": 1'))
        with pytest.raises(TrainingError, match="was saved with"):
            trainer.load(tmp_path / "checkpoint")
        with pytest.raises(TrainingError, match="no checkpoint"):
            trainer.load(tmp_path)


def test_bfloat16_keeps_float32_main_weights(folder, tmp_path) -> None:
    with trainer_of(folder, dtype="bfloat16", dp=2) as trainer:
        before = weights_of(trainer)
        for _ in range(3):
            trainer.forward_backward(forest())
            step = trainer.optimizer_step(3)
        assert 0.0 < step.grad_norm < float("inf")
        after = weights_of(trainer)
        assert all(t.dtype == torch.bfloat16 for t in after.values())
        assert any(not torch.equal(after[k], before[k]) for k in after)
        trainer.save(tmp_path / "checkpoint")
        trainer.load(tmp_path / "checkpoint")
