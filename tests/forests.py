"""Random executions for tests: trees of calls over a tiny vocabulary, as training paths."""

from __future__ import annotations

import numpy as np

from gyre_backend.select.paths import TrainPath
from gyre_backend.tree.plan import TreePlan, token_parents

VOCABULARY = 61


def make_path(execution: str, ids: list[int], calls: list[int], *, group: str = "g", leaf: str = "0") -> TrainPath:
    """A path whose token t is trained by call `calls[t]` (-1: context), at output index t."""
    ids_n, call_n = np.array(ids, np.int32), np.array(calls, np.int32)
    trained = call_n >= 0
    logp = -0.5 - (ids_n * 7 % 13) / 6.0
    return TrainPath(
        execution=execution,
        group=group,
        role="main",
        leaf=leaf,
        token_ids=ids_n,
        call=call_n,
        index=np.where(trained, np.arange(len(ids_n)), -1).astype(np.int32),
        old_logprobs=np.where(trained, logp, np.nan).astype(np.float32),
        versions=np.where(trained, ids_n % 3, -1).astype(np.int32),
    )


def random_paths(
    seed: int, *, executions: int = 2, branches: int = 4, longest: int = 6, vocabulary: int = VOCABULARY
) -> tuple[list[TrainPath], dict[str, float]]:
    """Paths of `executions` random token trees, each token trained at most once, and an advantage per
    execution.

    Each execution grows by branching off a random place of a random earlier path, so there are chains, stars,
    leaves that end inside another path, executions that agree on tokens, and (with some luck) several roots.
    """
    rng = np.random.default_rng(seed)
    paths: list[TrainPath] = []
    advantages = {}
    prompts = [rng.integers(0, vocabulary, rng.integers(1, longest + 1)).tolist() for _ in range(2)]
    for e in range(executions):
        name = f"e{e}"
        advantages[name] = float(rng.normal())
        grown: list[list[int]] = [list(prompts[int(rng.integers(2))])]
        taken: set[tuple[int, ...]] = set()
        for call in range(int(rng.integers(1, branches + 1))):
            base = grown[int(rng.integers(len(grown)))]
            cut = int(rng.integers(1, len(base) + 1))
            ids = base[:cut] + rng.integers(0, vocabulary, rng.integers(1, longest + 1)).tolist()
            grown.append(ids)
            calls = []
            for t in range(len(ids)):
                fresh = t >= cut and tuple(ids[: t + 1]) not in taken and rng.random() < 0.7
                calls.append(call if fresh else -1)
                if fresh:
                    taken.add(tuple(ids[: t + 1]))
            paths.append(make_path(name, ids, calls, leaf=str(call)))
    return paths, advantages


def path_to(plan: TreePlan, token: int) -> tuple[int, ...]:
    """Token ids from the root to a packed token."""
    parents, chain = token_parents(plan), []
    while token >= 0:
        chain.append(int(plan.ids[token]))
        token = parents[token]
    return tuple(chain[::-1])


def edge_rows(plan: TreePlan) -> dict[tuple[str, int, int], tuple[object, ...]]:
    """(execution, call, index) -> (context, target, weight, advantage, logprob) of every edge."""
    return {
        (plan.executions[e], c, i): (path_to(plan, s), t, w, a, p)
        for e, c, i, s, t, w, a, p in zip(
            plan.edge_exec, plan.edge_call, plan.edge_index, plan.edge_src, plan.edge_tgt,
            plan.edge_w, plan.edge_adv, plan.edge_old_logp,
        )
    }  # fmt: skip
