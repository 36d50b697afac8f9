"""Each loss against its formula, written out edge by edge; gradients against finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.algorithms import NAMES, EdgeBatch, make
from gyre_backend.errors import UnsupportedError
from gyre_backend.tree.plan import build_plan
from tests.forests import make_path

floats = st.floats(-3, 3, allow_nan=False)


@st.composite
def batches(draw) -> EdgeBatch:
    n = draw(st.integers(1, 12))

    def column(strategy=floats) -> torch.Tensor:
        return torch.tensor(draw(st.lists(strategy, min_size=n, max_size=n)), dtype=torch.float64)

    replies = sorted(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    _, reply = torch.unique(torch.tensor(replies), return_inverse=True)
    return EdgeBatch(
        logp=column().requires_grad_(),
        old_logp=column(),
        adv=column(),
        weight=column(st.floats(0.01, 1)),
        execution=torch.zeros(n, dtype=torch.int64),
        reply=reply,
        staleness=column(st.integers(0, 4)).double(),
        ref_logp=column(),
    )


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, adv: float, low: float, high: float) -> float:
    return -min(ratio * adv, clip(ratio, 1 - low, 1 + high) * adv)


def rows(batch: EdgeBatch):
    return list(zip(*(t.tolist() for t in (batch.logp.detach(), batch.old_logp, batch.adv, batch.weight, batch.reply))))


@given(batches())
def test_clipped_surrogates(batch) -> None:
    for name, low, high in (("grpo", 0.2, 0.2), ("dapo", 0.2, 0.28), ("dr_grpo", 0.2, 0.2)):
        wanted = sum(w * surrogate(math.exp(p - o), a, low, high) for p, o, a, w, _ in rows(batch))
        assert make(name)(batch).loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(batches())
def test_dual_clip_bounds_the_loss_of_bad_tokens(batch) -> None:
    wanted = 0.0
    for p, o, a, w, _ in rows(batch):
        loss = surrogate(math.exp(p - o), a, 0.2, 0.2)
        wanted += w * (min(loss, -3.0 * a) if a < 0 else loss)
    assert make("grpo", dual_clip=3.0)(batch).loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(batches())
def test_cispo_clips_the_weight_and_keeps_every_gradient(batch) -> None:
    result = make("cispo", clip_low=0.5, clip_high=1.0)(batch)
    (grad,) = torch.autograd.grad(result.loss, batch.logp)
    wanted = [-w * a * clip(math.exp(p - o), 0.5, 2.0) for p, o, a, w, _ in rows(batch)]
    assert grad.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(batches())
def test_gspo_has_one_ratio_per_reply(batch) -> None:
    table = rows(batch)
    wanted = 0.0
    for _, _, a, w, reply in table:
        gaps = [p - o for p, o, _, _, other in table if other == reply]
        wanted += w * surrogate(math.exp(sum(gaps) / len(gaps)), a, 0.1, 0.2)
    assert make("gspo", clip_low=0.1, clip_high=0.2)(batch).loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(batches())
def test_reinforce(batch) -> None:
    wanted = sum(-w * a * p for p, _, a, w, _ in rows(batch))
    assert make("reinforce")(batch).loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(batches())
def test_truncated_and_masked_importance_weights(batch) -> None:
    truncated = masked = 0.0
    for p, o, a, w, _ in rows(batch):
        raw = math.exp(p - o)
        truncated += -w * min(raw, 2.0) * a
        masked += -w * (raw if 0.5 <= raw <= 2.0 else 0.0) * a
    settings = {"proximal": "step", "importance_cap": 2.0}
    found = make("grpo", importance="truncate", **settings)(batch).loss.item()
    assert found == pytest.approx(truncated, rel=1e-9, abs=1e-12), "at the step's weights the ratio is 1"
    found = make("grpo", importance="mask", importance_floor=0.5, **settings)(batch).loss.item()
    assert found == pytest.approx(masked, rel=1e-9, abs=1e-12)


@given(batches(), st.integers(0, 3))
def test_stale_edges_get_no_gradient(batch, limit) -> None:
    for name in NAMES:
        if name == "gspo":  # a reply's ratio still reads its stale edges
            continue
        (grad,) = torch.autograd.grad(make(name, max_staleness=limit)(batch).loss, batch.logp)
        assert (grad[batch.staleness > limit] == 0).all()


@given(batches())
def test_kl_term_is_k3_and_never_negative(batch) -> None:
    still = replace(batch, adv=torch.zeros_like(batch.adv))
    wanted = 0.0
    for p, r, w in zip(batch.logp.tolist(), batch.ref_logp.tolist(), batch.weight.tolist()):
        wanted += w * 0.3 * (math.exp(r - p) - (r - p) - 1)
    assert make("grpo", kl=0.3)(still).loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert wanted >= -1e-12
    with pytest.raises(UnsupportedError, match="ref_model"):
        make("grpo", kl=0.3)(replace(batch, ref_logp=None))


@given(batches(), st.sampled_from(NAMES))
def test_gradients_match_finite_differences(batch, name) -> None:
    if name == "cispo":  # its weight is detached on purpose: tested above
        return
    algorithm, step = make(name), 1e-6
    logp = batch.logp.detach()
    gaps = (logp - batch.old_logp).exp()
    if min(((gaps - edge).abs().min().item()) for edge in (0.8, 1.2, 1.28)) < 1e-3 or name == "gspo":
        algorithm = make(name, clip_low=0.99, clip_high=1e9) if name not in ("reinforce",) else algorithm
    (grad,) = torch.autograd.grad(algorithm(batch).loss, batch.logp)
    for i in range(len(logp)):
        nudge = torch.zeros_like(logp)
        nudge[i] = step
        above, below = (algorithm(replace(batch, logp=logp + s * nudge)).loss.item() for s in (1, -1))
        assert (above - below) / (2 * step) == pytest.approx(grad[i].item(), rel=1e-4, abs=1e-5)


def batch_of(logp, old, **columns) -> EdgeBatch:
    logp_E = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    ones = torch.ones_like(logp_E).detach()
    settings = {
        "adv": ones,
        "weight": ones,
        "execution": torch.zeros(len(logp), dtype=torch.int64),
        "reply": torch.zeros(len(logp), dtype=torch.int64),
        "staleness": ones * 0,
    }
    return EdgeBatch(logp=logp_E, old_logp=torch.tensor(old, dtype=torch.float64), **(settings | columns))


def test_metrics() -> None:
    batch = batch_of(
        [-1.0, -1.0, -1.0, -2.0],
        [-1.0, -2.0, -1.0, -1.0],
        staleness=torch.tensor([0.0, 1.0, 2.0, 5.0]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        adv=torch.tensor([1.0, 1.0, -1.0, 1.0]),
    )
    found = make("grpo", max_staleness=3)(batch).metrics
    assert found["clip_share"] == 0.25, "only the second ratio, e, is above 1.2 with a positive advantage"
    assert found["logp_gap_mean"] == pytest.approx(0.0)
    assert found["logp_gap_abs"] == pytest.approx(0.5)
    assert found["logp_gap_max"] == pytest.approx(1.0)
    assert found["staleness_mean"] == 2.0
    assert found["staleness_max"] == 5.0
    assert found["importance_zero_share"] == 0.25
    assert found["entropy"] == 2.5
    assert found["positive_share"] == 0.75
    assert found["ratio_p50"] == pytest.approx(1.0)
    assert found["sampler_kl"] == pytest.approx((math.e - 2 + math.exp(-1) + 0) / 4)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_gaps_stay_finite(name) -> None:
    batch = batch_of([-1e4, -0.1], [-0.1, -1e4])
    result = make(name, importance="truncate")(batch)
    (grad,) = torch.autograd.grad(result.loss, batch.logp)
    assert math.isfinite(result.loss.item())
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_no_edges_no_loss(name) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    batch = batch_of([], [], execution=empty, reply=empty)
    assert make(name)(batch).loss.item() == 0.0


def test_batch_of_a_plan() -> None:
    paths = [make_path("a", [1, 2, 3], [-1, 0, 1]), make_path("b", [1, 2], [-1, 0])]
    plan = build_plan(paths, {"a": 1.0, "b": -1.0})
    batch = EdgeBatch.of(plan, torch.zeros(3, dtype=torch.float64), version=4)
    assert batch.weight.sum().item() == 2.0
    assert len(set(batch.reply.tolist())) == 3
    assert batch.staleness.tolist() == (4 - plan.edge_version).tolist()
    assert EdgeBatch.of(plan, torch.zeros(3), version=0).staleness.min() == 0


def test_staleness_in_queue_is_counted_from_the_executions_latest_version() -> None:
    path = make_path("a", [1, 2, 4], [-1, 0, 0])  # versions: 2 and 1
    plan = build_plan([path], {"a": 1.0})
    assert sorted(plan.edge_version.tolist()) == [1, 2]
    found = make("grpo")(EdgeBatch.of(plan, torch.zeros(2, dtype=torch.float64), version=5)).metrics
    assert found["staleness_in_queue"] == 3.0
    assert found["staleness_pre_queue"] == 0.5
    assert found["staleness_mean"] == 3.5


def test_unknown_names_and_options_are_named() -> None:
    with pytest.raises(UnsupportedError, match="'ppo'"):
        make("ppo")
    with pytest.raises(UnsupportedError, match=r"algorithm\.clip: grpo"):
        make("grpo", clip=0.1)
    for options in ({"proximal": "old"}, {"importance": "some"}, {"importance_floor": 3.0}):
        with pytest.raises(UnsupportedError, match="algorithm"):
            make("grpo", **options)
    with pytest.raises(UnsupportedError, match="token_budget"):
        make("dr_grpo", token_budget=0)
