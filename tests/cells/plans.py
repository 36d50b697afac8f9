"""Small random tree plans."""

from __future__ import annotations

import numpy as np

from gyre_backend.select.paths import TrainPath
from gyre_backend.tree.plan import TreePlan, build_plan


def random_plan(seed: int, executions: int = 2, prompt: int = 8, reply: int = 10) -> TreePlan:
    """Executions with one common prompt, one reply each, rewards that differ."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 200, prompt)
    paths, advantages = [], {}
    for number in range(executions):
        ids = np.concatenate([shared, rng.integers(3, 200, reply)]).astype(np.int32)
        mine = np.arange(len(ids)) >= prompt
        name = f"{seed:04d}-{number}"
        paths.append(
            TrainPath(
                execution=name,
                group=f"g{seed}",
                role="main",
                leaf="0",
                token_ids=ids,
                call=np.where(mine, 0, -1).astype(np.int32),
                index=np.where(mine, np.arange(len(ids)) - prompt, -1).astype(np.int32),
                old_logprobs=np.where(mine, -5.3, np.nan).astype(np.float32),
                versions=np.where(mine, 0, -1).astype(np.int32),
            )
        )
        advantages[name] = 1.0 if number % 2 else -0.7
    return build_plan(paths, advantages)
