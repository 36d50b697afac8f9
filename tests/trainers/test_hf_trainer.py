"""What a cell relies on: refusals, buffers that stay put, checkpoints that resume, folders an engine
loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gyre_backend.algorithms import make
from gyre_backend.errors import TrainingError, UnsupportedError
from gyre_backend.trainers import create, files
from gyre_backend.trainers.base import MicroStepResult, TrainerConfig, merge_metrics
from gyre_backend.trainers.hf import HFTrainer
from gyre_backend.tree.plan import build_plan
from tests.forests import make_path, random_paths

LOSS = make("grpo")


def new_trainer(folder: Path, **settings) -> HFTrainer:
    return HFTrainer(folder, TrainerConfig(**settings), settings.pop("algorithm", LOSS))


def plan_of(seed: int = 0):
    return build_plan(*random_paths(seed, executions=3, branches=4))


def weights(trainer: HFTrainer) -> list[torch.Tensor]:
    return [buffer.tensor.clone() for buffer in trainer.named_weights()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding_window"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits"),
        ("llama", {"expert_capacity": 4}, "expert_capacity = 4"),
    ],
)
def test_refusals_name_the_setting(model_dir, family, changes, named) -> None:
    with pytest.raises(UnsupportedError, match=named):
        new_trainer(model_dir(family, **changes))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "float16"}, "trainer.dtype = 'float16'"),
        ({"attention": "magic"}, "attention = 'magic'"),
        ({"options": {"context_parallel": 2}}, "context_parallel = 2"),
        ({"autocast": "int8"}, "trainer.autocast"),
    ],
)
def test_settings_are_refused(model_dir, settings, named) -> None:
    with pytest.raises(TrainingError, match=named):
        new_trainer(model_dir("llama"), **settings)


def test_model_that_leaks_between_branches_is_found(model_dir, monkeypatch) -> None:
    from gyre_backend.trainers import hf_model

    def leaky(*args, **kwargs):
        out, weights_ = original(*args, **kwargs)
        return out + 0.1 * out.mean(1, keepdim=True), weights_

    original = hf_model.attention_forward
    monkeypatch.setattr(hf_model, "attention_forward", leaky)
    with pytest.raises(UnsupportedError, match="differently from its paths"):
        new_trainer(model_dir("llama"))


def test_unknown_trainer_and_missing_model(tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="trainer = 'jax'"):
        create(TrainerConfig(trainer="jax"), tmp_path, LOSS)
    with pytest.raises(UnsupportedError, match=r"no config\.json"):
        create(TrainerConfig(), tmp_path, LOSS)


def test_buffers_stay_at_their_addresses(model_dir) -> None:
    trainer = new_trainer(model_dir("llama"), lr=1e-3)
    before = [(b.name, b.tensor.data_ptr()) for b in trainer.named_weights() + trainer.named_grads()]
    start = weights(trainer)
    result = trainer.forward_backward(plan_of())
    assert result.edges == plan_of().num_edges
    assert result.flat_tokens > result.tokens
    step = trainer.optimizer_step(3)
    assert (step.version, trainer.version, step.num_executions) == (1, 1, 3)
    assert [(b.name, b.tensor.data_ptr()) for b in trainer.named_weights() + trainer.named_grads()] == before
    assert not equal(start, weights(trainer))
    assert all((b.tensor == 0).all() for b in trainer.named_grads())
    assert len({b.name for b in trainer.named_weights()}) == len(trainer.named_weights())
    assert "lm_head.weight" not in {b.name for b in trainer.named_weights()}, "tied: listed once"


def test_gradient_is_divided_by_n_and_clipped(model_dir) -> None:
    norms = []
    for n in (1, 4):
        trainer = new_trainer(model_dir("llama"))
        trainer.forward_backward(plan_of())
        norms.append(trainer.optimizer_step(n).grad_norm)
    assert norms[0] == pytest.approx(4 * norms[1], rel=1e-5)


def test_warmup(model_dir) -> None:
    trainer = new_trainer(model_dir("llama"), lr=1.0, warmup_steps=4, max_grad_norm=1e-9)
    rates = []
    for _ in range(5):
        trainer.forward_backward(plan_of())
        rates.append(trainer.optimizer_step(1).lr)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_bad_steps_are_refused_and_change_nothing(model_dir) -> None:
    trainer = new_trainer(model_dir("llama"))
    start = weights(trainer)
    with pytest.raises(TrainingError, match="at least one"):
        trainer.optimizer_step(0)
    trainer.named_grads()[0].tensor.fill_(float("nan"))
    with pytest.raises(TrainingError, match="gradient norm is nan"):
        trainer.optimizer_step(1)
    assert trainer.version == 0
    assert equal(start, weights(trainer))


def test_plan_without_edges_adds_nothing(model_dir) -> None:
    trainer = new_trainer(model_dir("llama"))
    assert trainer.forward_backward(build_plan([], {})).loss == 0.0
    assert all((b.tensor == 0).all() for b in trainer.named_grads())


def test_checkpoint_resumes_bit_for_bit(model_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "SHARD_BYTES", 8000)
    first = new_trainer(model_dir("qwen3"), lr=1e-3)
    for step in range(2):
        first.forward_backward(plan_of(step))
        first.optimizer_step(3)
    first.save(tmp_path / "checkpoint")
    assert len(list((tmp_path / "checkpoint").glob("shard-*.safetensors"))) > 2
    second = new_trainer(model_dir("qwen3"), lr=1e-3)
    second.load(tmp_path / "checkpoint")
    assert second.version == 2
    for trainer in (first, second):
        trainer.forward_backward(plan_of(9))
        trainer.optimizer_step(3)
    assert equal(weights(first), weights(second))


def test_checkpoint_of_another_model_is_refused(model_dir, tmp_path) -> None:
    new_trainer(model_dir("qwen3")).save(tmp_path / "checkpoint")
    with pytest.raises(TrainingError, match="another model"):
        new_trainer(model_dir("llama")).load(tmp_path / "checkpoint")
    with pytest.raises(TrainingError, match="not a checkpoint"):
        new_trainer(model_dir("llama")).load(tmp_path)


def test_interrupted_save_keeps_the_old_checkpoint(model_dir, tmp_path, monkeypatch) -> None:
    trainer = new_trainer(model_dir("llama"))
    trainer.save(tmp_path / "checkpoint")
    before = sorted(p.name for p in tmp_path.rglob("*"))

    def fail(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("gyre_backend.trainers.hf.save_tensors", fail)
    with pytest.raises(OSError, match="no space"):
        trainer.save(tmp_path / "checkpoint")
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_export_loads_as_a_transformers_model(model_dir, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    source = model_dir("qwen3")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    trainer = new_trainer(source, lr=1e-2)
    trainer.forward_backward(plan_of())
    trainer.optimizer_step(1)
    trainer.export_hf(tmp_path / "export")
    assert (tmp_path / "export" / "tokenizer_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert equal([weight.data for weight in model.parameters()], weights(trainer))
    assert json.loads((tmp_path / "export" / "config.json").read_text()).get("attn_implementation") is None


def test_load_weights_takes_the_version(model_dir) -> None:
    trainer = new_trainer(model_dir("llama"))
    trainer.load_weights(7)
    assert trainer.version == 7
    assert trainer.forward_backward(plan_of()).metrics["staleness_max"] == 7


def test_kl_to_a_reference(model_dir) -> None:
    algorithm = make("grpo", kl=0.1)
    trainer = HFTrainer(model_dir("llama"), TrainerConfig(ref_model=str(model_dir("llama")), lr=1e-2), algorithm)
    assert trainer.forward_backward(plan_of()).metrics["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    trainer.optimizer_step(1)
    assert trainer.forward_backward(plan_of()).metrics["ref_kl"] > 0


def test_bfloat16_autocast_is_close(model_dir) -> None:
    plain = new_trainer(model_dir("llama"))
    mixed = new_trainer(model_dir("llama"), autocast="bfloat16")
    a, b = plain.logprobs(plan_of()), mixed.logprobs(plan_of())
    assert 0 < (a - b).abs().max() < 0.5


def test_metrics_of_micro_steps_merge_by_edges() -> None:
    def result(edges: int, **metrics: float) -> MicroStepResult:
        return MicroStepResult(loss=0.0, edges=edges, tokens=1, flat_tokens=1, seconds=0.0, metrics=metrics)

    merged = merge_metrics([result(1, entropy=1.0, gap_max=5.0), result(3, entropy=2.0, gap_max=3.0)])
    assert merged == {"entropy": 1.75, "gap_max": 5.0}


def test_training_raises_the_probability_of_what_was_good(model_dir) -> None:
    """The end that matters: after a few steps the rewarded reply is likelier, the other one less so."""
    good, bad = make_path("a", [1, 2, 3, 4], [-1, -1, 0, 0]), make_path("b", [1, 2, 5, 6], [-1, -1, 0, 0])
    plan = build_plan([good, bad], {"a": 1.0, "b": -1.0})
    trainer = HFTrainer(model_dir("llama"), TrainerConfig(lr=1e-3), make("reinforce"))
    before = trainer.logprobs(plan)
    for _ in range(5):
        trainer.forward_backward(plan)
        trainer.optimizer_step(2)
    change = (trainer.logprobs(plan) - before)[:]
    rewarded = torch.tensor(plan.edge_adv > 0)
    assert (change[rewarded] > 0).all()
    assert change[~rewarded].sum() < 0
