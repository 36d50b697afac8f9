"""Gated DeltaNet and its short convolution on trees: state and inputs fork at branch points, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forests import VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import forest, relative

from gyre_backend.algorithms import make
from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers.base import TrainerConfig, create
from gyre_backend.tree import linear
from gyre_backend.tree.plan import TreePlan, chain_of, flatten_plan, token_parents

seeds = st.integers(0, 10**6)


def one_by_one(q, k, v, g, beta):
    """The rule as written, token by token, for one path: [T, H, ...]."""
    state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        write = beta[t][:, None] * (v[t] - torch.einsum("hde,hd->he", state, k[t]))
        state = state + torch.einsum("hd,he->hde", k[t], write)
        out.append(torch.einsum("hde,hd->he", state, q[t] * q.shape[2] ** -0.5))
    return torch.stack(out)


def leaves(plan: TreePlan) -> list[np.ndarray]:
    """Packed indices of every root-to-leaf path."""
    parents = token_parents(plan)
    inner = set(parents.tolist())
    return [chain_of(parents, t) for t in range(plan.num_tokens) if t not in inner]


def rule_inputs(plan: TreePlan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(3, 5), (3, 5), (3, 4), (3,), (3,)]
    return [torch.randn(1, plan.num_tokens, *s, dtype=torch.float64, requires_grad=True) for s in shapes]


@given(seeds, st.sampled_from([2, 5, 64]))
def test_the_rule_equals_running_each_path_alone(seed: int, chunk: int) -> None:
    plan = forest(seed)
    if not plan.num_tokens:
        return
    inputs = rule_inputs(plan)
    q, k, v, raw_g, raw_beta = inputs
    g, beta = -torch.nn.functional.softplus(raw_g), raw_beta.sigmoid()
    weight = torch.randn(1, plan.num_tokens, 3, 4, dtype=torch.float64)
    whole, linear.CHUNK = linear.CHUNK, chunk
    try:
        out = linear.tree_gated_delta_rule(q, k, v, g, beta, plan, l2norm=False)
    finally:
        linear.CHUNK = whole
    found = torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True)
    loss, seen = torch.zeros((), dtype=torch.float64), set()
    for path in leaves(plan):
        alone = one_by_one(*(t[0, path] for t in (q, k, v, g, beta)))
        assert torch.allclose(alone, out[0, path], rtol=0, atol=1e-12)
        fresh = torch.tensor([t not in seen for t in path.tolist()], dtype=torch.float64)
        seen |= set(path.tolist())
        loss = loss + (alone * weight[0, path] * fresh[:, None, None]).sum()
    wanted = torch.autograd.grad(loss, inputs)
    names = "qkvgb"
    assert relative(dict(zip(names, found)), dict(zip(names, wanted))) <= 1e-12


@given(seeds, st.integers(1, 5), st.booleans())
def test_the_convolution_equals_running_each_path_alone(seed: int, width: int, with_bias: bool) -> None:
    plan = forest(seed)
    if not plan.num_tokens:
        return
    torch.manual_seed(0)
    x = torch.randn(1, 6, plan.num_tokens, dtype=torch.float64)
    weight = torch.randn(6, width, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64) if with_bias else None
    out = linear.tree_causal_conv(x, weight, bias, plan)
    for path in leaves(plan):
        alone = torch.nn.functional.conv1d(x[:, :, path], weight[:, None], bias, padding=width - 1, groups=6)[
            :, :, : len(path)
        ]
        assert torch.allclose(alone, out[:, :, path], rtol=0, atol=1e-12)


def hybrid(kind: str, **changes: Any) -> Any:
    """A model of Gated DeltaNet and full-attention layers, small enough for a test."""
    import transformers as t

    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}
    if kind == "qwen3_next":
        return t.Qwen3NextConfig(**base | experts | changes)
    return t.Qwen3_5TextConfig(**base | changes)


def save_hybrid(folder, kind: str, *, seed: int = 0, **changes: Any):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hybrid(kind, **changes), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_hybrid_models_train_trees_exactly(kind: str, checkpointing: bool, tmp_path) -> None:
    save_hybrid(tmp_path, kind)
    config = TrainerConfig(dtype="float64", gradient_checkpointing=checkpointing)
    trainer = create(config, tmp_path, make("grpo"))
    results = []
    for plan in (forest(), flatten_plan(forest())):
        result = trainer.forward_backward(plan)
        results.append((result.loss, {b.name: b.tensor.clone() for b in trainer.named_grads()}))
        trainer.zero_grad()
    (tree_loss, tree), (flat_loss, flat) = results
    assert abs(tree_loss - flat_loss) <= 1e-12
    assert relative(tree, flat) <= 1e-12


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_hooked_layers_equal_transformers_own_on_one_path(kind: str) -> None:
    """Without a plan a hooked model is untouched; with a plan of one path it computes the same."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hybrid(kind), dtype=torch.float32, attn_implementation="sdpa")
    plan = forest(11, executions=1, branches=1, longest=40)
    ids = torch.from_numpy(plan.ids.astype(np.int64))[None]
    layer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    hidden = torch.randn(1, ids.shape[1], 32)
    with torch.no_grad():
        before, wanted = model(ids).logits, layer(hidden)
        assert linear.install(model) == 2
        assert torch.equal(model(ids).logits, before)
        assert torch.allclose(layer(hidden, tree_plan=plan), wanted, rtol=0, atol=1e-5)


def test_a_leaking_state_would_be_seen() -> None:
    """The mutation: running the packed tokens straight through, without forking."""
    plan = forest()
    q, k, v, raw_g, raw_beta = rule_inputs(plan)
    g, beta = -torch.nn.functional.softplus(raw_g), raw_beta.sigmoid()
    out = linear.tree_gated_delta_rule(q, k, v, g, beta, plan, l2norm=False)
    straight = one_by_one(*(t[0] for t in (q, k, v, g, beta)))
    assert float((out[0] - straight).detach().norm() / out.detach().norm()) > 1e-2


@pytest.mark.parametrize("kind", ["MambaConfig", "RwkvConfig"])
def test_recurrent_models_that_cannot_be_hooked_are_refused(kind: str) -> None:
    import transformers as t

    config = getattr(t, kind)(vocab_size=32, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    model = t.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match="hooked"):
        linear.install(model)


def test_full_attention_models_are_left_alone() -> None:
    import transformers as t
    from tiny_models import config_of

    assert linear.install(t.AutoModelForCausalLM.from_config(config_of("llama"))) == 0
