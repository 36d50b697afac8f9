"""The tree computes what its flattened paths compute, to the last bits of float64: loss, every gradient, five
steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_backend.algorithms import make
from gyre_backend.trainers.base import TrainerConfig
from gyre_backend.trainers.hf import HFTrainer
from gyre_backend.trainers.hf_model import hidden_states, precision
from gyre_backend.tree.cost import CostModel
from gyre_backend.tree.plan import EDGE_FIELDS, TreePlan, build_plan, flatten_plan, validate
from gyre_backend.tree.split import balance, split_dfs
from tests.forests import make_path, random_paths

BAR = 1e-12
# Wide clip ranges: random sampler logprobs are far off, and a clipped edge would hide its gradient.
LOSS = make("grpo", clip_low=0.999, clip_high=1e6)
_trainers: dict = {}


@pytest.fixture
def trainer(model_dir):
    def get(family: str = "llama", algorithm=LOSS, **changes) -> HFTrainer:
        key = (family, repr(algorithm), repr(sorted(changes.items())))
        if key not in _trainers:
            config = TrainerConfig(**({"dtype": "float64", "lr": 1e-2} | changes))
            _trainers[key] = HFTrainer(model_dir(family), config, algorithm, version=3)
        _trainers[key].zero_grad()
        return _trainers[key]

    return get


def gradient(trainer: HFTrainer, *plans: TreePlan) -> tuple[float, list[torch.Tensor]]:
    trainer.zero_grad()
    loss = sum(trainer.forward_backward(plan).loss for plan in plans)
    return loss, [buffer.tensor.clone() for buffer in trainer.named_grads()]


def error(found, wanted) -> float:
    """Largest relative difference of the loss and of any parameter's gradient."""
    scale = max(float(g.norm()) for g in wanted[1])
    worst = abs(found[0] - wanted[0]) / max(abs(wanted[0]), 1e-3)
    for a, b in zip(found[1], wanted[1]):
        worst = max(worst, float((a - b).norm()) / max(float(b.norm()), 1e-3 * scale, 1e-30))
    return worst


def _with_edges(plan: TreePlan, keep: np.ndarray) -> TreePlan:
    return replace(plan, **{name: getattr(plan, name)[keep] for name in EDGE_FIELDS})


FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "qwen3_moe", "granite")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["rect", "rows", "dense"])
def test_loss_and_every_gradient_equal_the_flattened_ones(trainer, family: str, attention: str) -> None:
    @given(st.integers(0, 10**6))
    @settings(max_examples=3 if attention == "rect" else 1)
    def check(seed: int) -> None:
        plan = build_plan(*random_paths(seed, executions=3, branches=5))
        if plan.num_edges:
            holder = trainer(family, attention=attention)
            assert error(gradient(holder, plan), gradient(holder, flatten_plan(plan))) <= BAR

    check()


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_random_forests(model_dir_llama, seed: int) -> None:
    plan = build_plan(*random_paths(seed, executions=4, branches=6, longest=8))
    if plan.num_edges:
        assert error(gradient(model_dir_llama, plan), gradient(model_dir_llama, flatten_plan(plan))) <= BAR


@pytest.fixture(scope="module")
def model_dir_llama(model_dir) -> HFTrainer:
    return HFTrainer(model_dir("llama"), TrainerConfig(dtype="float64"), LOSS, version=3)


@pytest.mark.parametrize("depth", [1, 5, 20])
def test_deep_trees_of_single_tokens(trainer, depth: int) -> None:
    """A caterpillar: every trunk token has a one-token branch; segments of length 1, and a leaf inside
    another path."""
    trunk = [(7 * t) % 50 for t in range(depth + 1)]
    paths = [make_path("a", trunk, [-1] + [0] * depth)] if depth else []
    for t in range(depth):
        paths.append(make_path("a", [*trunk[: t + 1], 55], [-1] * (t + 1) + [t + 1], leaf=str(t)))
    plan = build_plan(paths, {"a": 0.7})
    assert int(plan.seg_depth.max()) == depth
    holder = trainer()
    assert error(gradient(holder, plan), gradient(holder, flatten_plan(plan))) <= BAR


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"logits_chunk": 3}])
def test_recomputation_changes_nothing(trainer, changes) -> None:
    plan = build_plan(*random_paths(11, executions=3, branches=5))
    assert error(gradient(trainer(**changes), plan), gradient(trainer(), flatten_plan(plan))) <= BAR


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("seed", [1, 2])
def test_segment_by_segment_equals_in_one_piece(trainer, family: str, seed: int) -> None:
    plan = build_plan(*random_paths(seed, executions=3, branches=6))
    bounded = trainer(family, bounded_memory=True)
    assert error(gradient(bounded, plan), gradient(trainer(family), flatten_plan(plan))) <= BAR


@pytest.mark.parametrize("settings_", [{"gradient_checkpointing": True}, {"logits_chunk": 2}])
def test_segment_by_segment_with_recomputation(trainer, settings_) -> None:
    plan = build_plan(*random_paths(3, executions=3, branches=6))
    assert error(gradient(trainer(bounded_memory=True, **settings_), plan), gradient(trainer(), plan)) <= BAR


def test_segment_by_segment_with_a_ratio_per_reply(trainer) -> None:
    plan = build_plan(*random_paths(4, executions=3, branches=6))
    algorithm = make("gspo", clip_low=0.9, clip_high=1e6)
    bounded = gradient(trainer(algorithm=algorithm, bounded_memory=True), plan)
    assert error(bounded, gradient(trainer(algorithm=algorithm), plan)) <= BAR


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "cispo", "gspo", "reinforce"])
def test_every_algorithm(trainer, name: str) -> None:
    plan = build_plan(*random_paths(12, executions=3, branches=5), weighting=make(name).weighting)
    holder = trainer(algorithm=make(name, importance="truncate"))
    assert error(gradient(holder, plan), gradient(holder, flatten_plan(plan))) <= BAR


def test_equals_transformers_own_attention_path_by_path(trainer, model_dir) -> None:
    """An oracle that shares no code with the tree: eager attention, one path at a time, the loss written
    out."""
    from transformers import AutoModelForCausalLM

    paths, advantages = random_paths(21, executions=3, branches=5)
    holder = trainer("gpt2")  # no norm that computes in float32
    found = gradient(holder, build_plan(paths, advantages))
    model = AutoModelForCausalLM.from_pretrained(model_dir("gpt2"), dtype=torch.float64, attn_implementation="eager")
    counts: dict[str, int] = {}
    for path in paths:
        counts[path.execution] = counts.get(path.execution, 0) + path.trained
    total = torch.zeros((), dtype=torch.float64)
    for path in paths:
        at = np.flatnonzero(path.call >= 0)
        if not len(at):
            continue
        logits = model(torch.tensor(path.token_ids[None].astype(np.int64)), use_cache=False).logits[0]
        logp = logits.log_softmax(-1)[at - 1, path.token_ids[at]]
        old = torch.tensor(path.old_logprobs[at].astype(np.float64))
        gain = (logp - old).exp().clamp(max=1e6 + 1) * advantages[path.execution]
        total = total - gain.sum() / counts[path.execution]
    total.backward()
    wanted = (float(total.detach()), [weight.grad for _, weight in model.named_parameters()])
    assert error(found, wanted) <= 1e-11


def test_finite_differences(trainer) -> None:
    holder, plan = trainer("qwen3"), build_plan(*random_paths(31, executions=2, branches=4))
    _, grads = gradient(holder, plan)
    rng = np.random.default_rng(0)
    weights = [buffer.tensor for buffer in holder.named_weights()]
    for _ in range(20):
        which = int(rng.integers(len(weights)))
        flat, place = weights[which].view(-1), int(rng.integers(weights[which].numel()))
        before, step, losses = float(flat[place]), 1e-5, []
        for sign in (1, -1):
            flat[place] = before + sign * step
            losses.append(gradient(holder, plan)[0])
        flat[place] = before
        found = (losses[0] - losses[1]) / (2 * step)
        assert found == pytest.approx(float(grads[which].view(-1)[place]), rel=1e-4, abs=1e-6)


def test_every_target_of_a_branch_point_gets_gradient(trainer) -> None:
    paths = [make_path("a", [1, 2, 3 + k], [-1, -1, k], leaf=str(k)) for k in range(4)]
    holder, plan = trainer("gpt2"), build_plan(paths, {"a": 1.0})
    assert plan.edge_src.tolist() == [1] * 4
    whole = gradient(holder, plan)
    parts = [gradient(holder, _with_edges(plan, np.arange(4) == k)) for k in range(4)]
    assert all(max(float(g.norm()) for g in grads) > 1e-3 for _, grads in parts)
    summed = (sum(loss for loss, _ in parts), [sum(column) for column in zip(*(grads for _, grads in parts))])
    assert error(summed, whole) <= BAR


# --- mutations: each must be caught by the comparison with the flattened plan ---


def _edge_dropped(plan: TreePlan) -> TreePlan:
    keep = np.ones(plan.num_edges, bool)
    branch = np.flatnonzero(np.bincount(plan.edge_src) > 1)[0]
    keep[np.flatnonzero(plan.edge_src == branch)[-1]] = False
    return _with_edges(plan, keep)


def _edge_doubled(plan: TreePlan) -> TreePlan:
    return replace(plan, **{name: np.append(getattr(plan, name), getattr(plan, name)[:1]) for name in EDGE_FIELDS})


MUTATIONS = {
    "packed positions": lambda plan: replace(plan, pos=np.arange(plan.num_tokens, dtype=np.int32)),
    "missing branch edge": _edge_dropped,
    "token counted twice": _edge_doubled,
    "sibling key leaked": lambda plan: replace(
        plan,
        seg_sub_end=np.where(plan.seg_parent >= 0, plan.seg_sub_end[np.maximum(plan.seg_parent, 0)], plan.seg_sub_end),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(trainer, name: str) -> None:
    paths = [make_path("a", [1, 2, 3 + k, 9, 9], [-1, -1, k, k, k], leaf=str(k)) for k in range(3)]
    plan = build_plan(paths, {"a": 1.0})
    mutant = MUTATIONS[name](plan)
    holder = trainer(attention="rect")
    assert error(gradient(holder, plan), gradient(holder, flatten_plan(plan))) <= BAR
    assert error(gradient(holder, mutant), gradient(holder, flatten_plan(plan))) > 1e-4


@pytest.mark.parametrize("name", ["packed positions", "token counted twice"])
def test_validate_catches_them_before_training(name: str) -> None:
    plan = build_plan([make_path("a", [1, 2, 3 + k], [-1, -1, k], leaf=str(k)) for k in range(2)], {"a": 1.0})
    with pytest.raises(ValueError, match="position|twice"):
        validate(MUTATIONS[name](plan))


# --- independence, splitting, steps ---


def test_siblings_do_not_see_each_other_bitwise(trainer) -> None:
    holder = trainer("llama")
    paths = [make_path("a", [1, 2, 10 * k + 3, 4, 5], [-1, -1, k, k, k], leaf=str(k)) for k in range(3)]
    plan = build_plan(paths, {"a": 1.0})
    ids = plan.ids.copy()
    middle = plan.segments()[2]
    ids[middle.start : middle.end] = 60 - ids[middle.start : middle.end]
    with torch.no_grad(), precision(holder.model):
        before, after = hidden_states(holder.model, plan), hidden_states(holder.model, replace(plan, ids=ids))
    others = np.ones(plan.num_tokens, bool)
    others[middle.start : middle.end] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.parametrize("seed", range(3))
def test_split_and_accumulated_equals_unsplit(trainer, seed: int) -> None:
    plan = build_plan(*random_paths(seed, executions=4, branches=6))
    parts = split_dfs(plan, int(plan.pos.max()) + 3)
    assert len(parts) > 1
    assert error(gradient(trainer(), *parts), gradient(trainer(), plan)) <= BAR


def test_gspo_split_by_whole_replies_equals_unsplit(trainer) -> None:
    holder = trainer(algorithm=make("gspo", clip_low=0.9, clip_high=1e6))
    paths = [make_path("a", [1, 2, 3 + k, 9, 8, 7], [-1, -1] + [k] * 4, leaf=str(k)) for k in range(5)]
    plan = build_plan(paths, {"a": 1.0})
    parts = split_dfs(plan, 11, whole_replies=True)
    assert len(parts) > 1
    assert error(gradient(holder, *parts), gradient(holder, plan)) <= BAR


def test_balanced_over_ranks_equals_one_rank(trainer) -> None:
    holder, plan = trainer(), build_plan(*random_paths(5, executions=5, branches=6))
    shares = balance(plan, 3, CostModel.of_model(holder.model), max_tokens=int(plan.pos.max()) + 8)
    assert error(gradient(holder, *(part for share in shares for part in share)), gradient(holder, plan)) <= BAR


def test_five_adamw_steps_equal_the_flattened_ones(model_dir) -> None:
    ends = []
    for flat in (False, True):
        holder = HFTrainer(model_dir("qwen3"), TrainerConfig(dtype="float64", lr=1e-3, warmup_steps=2), LOSS)
        for step in range(5):
            plan = build_plan(*random_paths(100 + step, executions=3, branches=5))
            holder.forward_backward(flatten_plan(plan) if flat else plan)
            holder.optimizer_step(len(plan.executions))
        ends.append([buffer.tensor.clone() for buffer in holder.named_weights()])
        assert holder.version == 5
    for tree, flat in zip(*ends):
        assert (tree - flat).abs().max().item() <= 1e-10
