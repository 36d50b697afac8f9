"""Selection from real branch graphs, built from records."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gyre_backend.errors import UnsupportedError
from gyre_backend.select import SelectionConfig, select, select_group
from gyre_backend.tree.plan import build_plan
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire.records import Delivered, Failed, Intent, Labelled, Link, Opened, Outcome, Result, Sealed, Span

ROLES = ("main", "main-summary", "subagent", "subagent-summary")


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


class Story:
    """Writes an execution's records, one call after the other."""

    def __init__(self, execution: str = "e" * 12, group: str = "g") -> None:
        self.clock = 0.0
        self.records: list = [Opened(execution=execution, at=self.tick(), group=group)]
        self.calls = 0

    def tick(self) -> float:
        self.clock += 1.0
        return self.clock

    def call(self, delta, output, *, base=(-1, 0), finish="stop", delivered=True, version=3, fail=False) -> int:
        number, self.calls = self.calls, self.calls + 1
        self.records.append(
            Intent(call=number, at=self.tick(), dialect="chat", base_call=base[0], base_len=base[1], delta=ids(*delta))
        )
        logprobs = (-np.arange(1, len(output) + 1) / 10).astype("<f4").tobytes()
        spans = (Span(version, 0, len(output)),)
        if fail:
            self.records.append(
                Failed(call=number, at=self.tick(), error="gone", ids=ids(*output), logprobs=logprobs, versions=spans)
            )
            return number
        self.records.append(
            Result(call=number, at=self.tick(), ids=ids(*output), logprobs=logprobs, versions=spans, finish=finish)
        )
        if delivered is not None:
            self.records.append(Delivered(call=number, at=self.tick(), complete=delivered))
        return number

    def seal(self, reward: float | None = 1.0, **outcome) -> BranchGraph:
        settings = {"status": "completed", "reward": reward, "valid": reward is not None} | outcome
        self.records.append(Sealed(at=self.tick(), outcome=Outcome(**settings)))
        return BranchGraph.replay(self.records)


def trained(paths) -> set[tuple[int, int]]:
    return {(int(c), int(i)) for p in paths for c, i in zip(p.call, p.index) if c >= 0}


def test_path_carries_tokens_owners_logprobs_and_versions() -> None:
    story = Story()
    story.call([1, 2], [3, 4])
    story.call([5], [6], base=(0, 4), version=4)
    (path,) = select(story.seal(), roles=ROLES, j_max=5, seed=0)
    assert path.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert path.call.tolist() == [-1, -1, 0, 0, -1, 1]
    assert path.index.tolist() == [-1, -1, 0, 1, -1, 0]
    assert path.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert path.old_logprobs[[2, 3, 5]].tolist() == pytest.approx([-0.1, -0.2, -0.1])
    assert np.isnan(path.old_logprobs[[0, 1, 4]]).all()
    assert (path.role, path.group) == ("main", "g")


def test_shared_tokens_are_trained_once() -> None:
    story = Story()
    first = story.call([1, 2], [3, 4])
    story.call([5], [6, 7], base=(first, 4))
    story.call([8], [9], base=(first, 4))
    paths = select(story.seal(), roles=ROLES, j_max=None, seed=0)
    assert len(paths) == 2
    assert sum(path.trained for path in paths) == 5
    assert trained(paths) == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
    assert build_plan(paths, {"e" * 12: 1.0}).num_edges == 5


def test_undelivered_reply_is_context_at_most() -> None:
    story = Story()
    first = story.call([1, 2], [3, 4])
    story.call([5], [6, 7], base=(first, 4), delivered=False)
    again = story.call([5], [6, 8], base=(first, 4))
    story.records.append(Link(kind="retries", source=1, target=again, at=story.tick()))
    paths = select(story.seal(), roles=ROLES, j_max=None, seed=0)
    assert trained(paths) == {(0, 0), (0, 1), (2, 0), (2, 1)}


def test_what_led_to_an_undelivered_last_reply_is_trained() -> None:
    story = Story()
    first = story.call([1, 2], [3, 4])
    story.call([5], [6, 7], base=(first, 4), delivered=False)
    (path,) = select(story.seal(), roles=ROLES, j_max=None, seed=0)
    assert trained([path]) == {(0, 0), (0, 1)}
    assert path.token_ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("settings", [{"finish": "abort"}, {"finish": "error"}, {"fail": True}])
def test_failed_partials_are_never_trained(settings) -> None:
    story = Story()
    first = story.call([1, 2], [3])
    story.call([5], [6, 7], base=(first, 3), **settings)
    paths = select(story.seal(), roles=ROLES, j_max=None, seed=0)
    assert trained(paths) == {(0, 0)}


def test_reply_with_a_logprob_that_is_not_finite_is_never_trained() -> None:
    story = Story()
    first = story.call([1, 2], [3])
    story.call([5], [6, 7], base=(first, 3))
    broken = np.array([-0.1, np.nan], "<f4").tobytes()
    story.records = [msgspec.structs.replace(r, logprobs=broken) if _is_result(r, 1) else r for r in story.records]
    assert trained(select(story.seal(), roles=ROLES, j_max=None, seed=0)) == {(0, 0)}


def _is_result(record, call: int) -> bool:
    return isinstance(record, Result) and record.call == call


def test_token_that_nothing_precedes_is_not_trained() -> None:
    story = Story()
    story.call([], [3, 4])
    (path,) = select(story.seal(), roles=ROLES, j_max=None, seed=0)
    assert trained([path]) == {(0, 1)}
    story = Story()
    story.call([], [3])
    assert select(story.seal(), roles=ROLES, j_max=None, seed=0) == []


def test_auxiliary_calls_are_left_out_and_main_comes_before_subagents() -> None:
    story = Story()
    story.call([1], [2])
    story.call([11], [12] * 50)
    story.call([21], [22])
    story.records.append(Labelled(call=1, at=story.tick(), role="subagent"))
    story.records.append(Labelled(call=2, at=story.tick(), role="auxiliary"))
    graph = story.seal()
    assert [path.role for path in select(graph, roles=ROLES, j_max=None, seed=0)] == ["main", "subagent"]
    assert [path.role for path in select(graph, roles=ROLES, j_max=1, seed=0)] == ["main"]
    assert [path.role for path in select(graph, roles=("auxiliary",), j_max=1, seed=0)] == ["auxiliary"]


def simple(name: str, reward: float | None, **outcome) -> BranchGraph:
    story = Story(name * 12)
    story.call([1, 2], [3, 4])
    return story.seal(reward, **outcome)


def test_group_leaves_invalid_executions_out_of_loss_and_baseline() -> None:
    graphs = [simple("a", 1.0), simple("b", 0.0), simple("c", None, failure="verifier")]
    found = select_group(graphs, SelectionConfig(estimator="dr_grpo"))
    assert found.advantages == {"a" * 12: 0.5, "b" * 12: -0.5}
    assert found.num_executions == 2
    assert {path.execution for path in found.paths} == {"a" * 12, "b" * 12}
    assert found.counters == {
        "executions": 3,
        "invalid": 1,
        "placeholders": 0,
        "branches": 3,
        "sampled_tokens": 6,
        "orphan_tokens": 0,
        "paths": 2,
        "trained_tokens": 4,
    }


def test_placeholder_counts_in_the_baseline_only_if_asked() -> None:
    graphs = [simple("a", 1.0), simple("b", None, placeholder=True, status="environment_error")]
    counted = select_group(graphs, SelectionConfig(estimator="dr_grpo", placeholders="count"))
    assert counted.advantages == {"a" * 12: 0.5, "b" * 12: -0.5}
    assert counted.num_executions == 2
    assert {path.execution for path in counted.paths} == {"a" * 12}
    dropped = select_group(graphs, SelectionConfig(estimator="dr_grpo", equal_rewards="keep"))
    assert dropped.advantages == {"a" * 12: 0.0}
    assert dropped.num_executions == 1


def test_group_of_equal_rewards_is_skipped_or_kept() -> None:
    graphs = [simple("a", 1.0), simple("b", 1.0)]
    skipped = select_group(graphs, SelectionConfig())
    assert (skipped.skipped, skipped.num_executions, skipped.paths) == (True, 0, ())
    kept = select_group(graphs, SelectionConfig(equal_rewards="keep"))
    assert (kept.skipped, kept.num_executions, len(kept.paths)) == (False, 2, 2)


def test_unsealed_execution_is_invalid() -> None:
    story = Story()
    story.call([1], [2])
    found = select_group([BranchGraph.replay(story.records), simple("a", 1.0)], SelectionConfig(equal_rewards="keep"))
    assert found.num_executions == 1


def test_j_max_must_be_positive() -> None:
    with pytest.raises(UnsupportedError, match="j_max"):
        SelectionConfig(j_max=0)
