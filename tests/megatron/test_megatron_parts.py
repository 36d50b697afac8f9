"""The parts of the Megatron trainer that need no process group: layouts, slices, losses, refusals, launcher."""

from __future__ import annotations

import types

import pytest
import torch
from tiny_models import config_of, save_model

from gyre_backend.algorithms import make
from gyre_backend.errors import TrainingError, UnsupportedError
from gyre_backend.trainers import megatron_layout, megatron_weights
from gyre_backend.trainers.base import TrainerConfig, create
from gyre_backend.trainers.megatron_loss import vocab_parallel_logprobs
from gyre_backend.trainers.ranks import SharedTensors


class FakeRank:
    """Parameters named and shaped as a tensor-parallel rank of a one-stage Megatron model holds them."""

    def __init__(self, hf, tp: int) -> None:
        head = hf.head_dim
        rows = megatron_layout.padded_vocab(hf, tp) // tp
        qkv = (hf.num_attention_heads + 2 * hf.num_key_value_heads) * head // tp
        shapes = {"embedding.word_embeddings.weight": (rows, hf.hidden_size)}
        for i in range(hf.num_hidden_layers):
            at = f"decoder.layers.{i}."
            shapes[at + "input_layernorm.weight"] = (hf.hidden_size,)
            shapes[at + "self_attention.linear_qkv.weight"] = (qkv, hf.hidden_size)
            if hf.model_type == "qwen2":
                shapes[at + "self_attention.linear_qkv.bias"] = (qkv,)
            if hf.model_type == "qwen3":
                shapes |= {at + f"self_attention.{x}_layernorm.weight": (head,) for x in "qk"}
            shapes[at + "self_attention.linear_proj.weight"] = (
                hf.hidden_size,
                hf.num_attention_heads * head // tp,
            )
            shapes[at + "pre_mlp_layernorm.weight"] = (hf.hidden_size,)
            shapes[at + "mlp.linear_fc1.weight"] = (2 * hf.intermediate_size // tp, hf.hidden_size)
            shapes[at + "mlp.linear_fc2.weight"] = (hf.hidden_size, hf.intermediate_size // tp)
        shapes["decoder.final_layernorm.weight"] = (hf.hidden_size,)
        if not hf.tie_word_embeddings:
            shapes["output_layer.weight"] = (rows, hf.hidden_size)
        self.parameters = {name: torch.nn.Parameter(torch.full(s, float("nan"))) for name, s in shapes.items()}
        self.decoder = types.SimpleNamespace(layers=[types.SimpleNamespace(layer_number=1)])

    def named_parameters(self):
        return self.parameters.items()


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_go_to_the_ranks_and_back_bitwise(kind: str, tp: int) -> None:
    hf = megatron_layout.Shape.of(config_of(kind))
    shapes = megatron_weights.hf_shapes(hf)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    back = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for rank in range(tp):
        geometry = megatron_weights.Geometry.of(
            hf, tp_rank=rank, tp=tp, padded_vocab=megatron_layout.padded_vocab(hf, tp)
        )
        held = megatron_weights.held(FakeRank(hf, tp), geometry)
        megatron_weights.pull(held, tensors)
        assert all(item.parameter.isfinite().all() for item in held), "a part of a parameter was never written"
        megatron_weights.push(held, back, tp_rank=rank)
    assert all(torch.equal(back[name], tensors[name]) for name in shapes)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_names_and_shapes_are_transformers_own(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    hf = config_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    wanted = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert list(megatron_weights.hf_shapes(megatron_layout.Shape.of(hf)).items()) == wanted


def test_expert_names_are_the_checkpoints(tmp_path) -> None:
    from safetensors.torch import load_file

    save_model(tmp_path, "qwen3_moe")
    found = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert megatron_weights.hf_shapes(megatron_layout.Shape.of(config_of("qwen3_moe"))) == found


def test_unknown_parameter_is_named() -> None:
    hf = megatron_layout.Shape.of(config_of("llama"))
    fake = FakeRank(hf, 1)
    fake.parameters["decoder.layers.0.mystery.weight"] = torch.nn.Parameter(torch.ones(1))
    geometry = megatron_weights.Geometry.of(hf, tp_rank=0, tp=1, padded_vocab=61)
    with pytest.raises(TrainingError, match="mystery"):
        megatron_weights.held(fake, geometry)


def test_logprobs_and_entropy_are_the_softmax_and_skip_padding() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 10, (9,))
    weight = torch.randn(9, dtype=torch.float64)
    logp, entropy = vocab_parallel_logprobs(logits, target, vocab_size=10, rank=0, group=None)
    full = logits[:, :10].log_softmax(-1)
    wanted = full.gather(1, target[:, None])[:, 0]
    assert torch.allclose(logp, wanted, rtol=0, atol=1e-14)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), rtol=0, atol=1e-14)
    (grad,) = torch.autograd.grad((logp * weight).sum(), logits)
    (wanted_grad,) = torch.autograd.grad((wanted * weight).sum(), logits)
    assert torch.allclose(grad, wanted_grad, rtol=0, atol=1e-14)
    assert not grad[:, 10:].any()


def test_shared_tensors_are_seen_through_their_path() -> None:
    ours = SharedTensors({"a": (3, 5), "b": (7,), "scalar": ()}, torch.float32)
    theirs = SharedTensors(ours.shapes, ours.dtype, ours.path)
    ours.tensors["b"].fill_(2.0)
    theirs.tensors["a"].fill_(3.0)
    assert theirs.tensors["b"].sum() == 14.0
    assert ours.tensors["a"].sum() == 45.0
    ours.close()
    assert ours.tensors["a"].sum() == 45.0


@pytest.mark.parametrize(
    ("kind", "changes", "parallel", "named"),
    [
        ("llama", {"attention_dropout": 0.1}, {}, "attention_dropout"),
        ("llama", {"attention_bias": True}, {}, "attention_bias"),
        ("llama", {"mlp_bias": True}, {}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, {}, "sliding"),
        ("qwen3", {}, {"tp": 4}, "num_key_value_heads"),
        ("qwen3", {}, {"pp": 3}, "num_hidden_layers"),
        ("qwen3_moe", {"output_router_logits": True}, {}, "output_router_logits"),
        ("qwen3_moe", {}, {"tp": 2}, "tp > 1 with experts"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(kind: str, changes: dict, parallel: dict, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        megatron_layout.refuse(config_of(kind, **changes), **{"tp": 1, "pp": 1, **parallel})


def test_other_models_and_rotary_kinds_are_refused() -> None:
    import transformers as t

    with pytest.raises(UnsupportedError, match="gpt2"):
        megatron_layout.refuse(t.GPT2Config(), tp=1, pp=1)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    with pytest.raises(UnsupportedError, match="yarn"):
        megatron_layout.rotary_frequencies(config_of("llama", rope_parameters=rope))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"options": {"cp": 2}}, r"unknown \['cp'\]"),
        ({"options": {"tp": 0}}, "tp = 0"),
        ({"autocast": "bfloat16"}, "autocast"),
        ({"bounded_memory": True}, "bounded_memory"),
        ({"dtype": "float16"}, "float16"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda"}, "CUDA devices"),
    ],
)
def test_settings_are_refused_before_a_rank_starts(tmp_path, settings: dict, named: str) -> None:
    save_model(tmp_path, "llama")
    config = TrainerConfig(trainer="megatron", **settings)
    with pytest.raises(UnsupportedError, match=named):
        create(config, tmp_path, make("grpo"))


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen3"])
def test_rotary_frequencies_are_transformers_own(kind: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = config_of(kind)
    assert torch.equal(megatron_layout.rotary_frequencies(hf), LlamaRotaryEmbedding(hf).inv_freq)
