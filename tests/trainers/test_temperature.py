"""Logprobs are computed at the sampler's temperature: else every ratio of the loss would compare two different policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_backend.models import tiny_dir
from gyre_backend.select.paths import TrainPath
from gyre_backend.tree.plan import build_plan


def _path(ids: list[int], first: int) -> TrainPath:
    count = len(ids)
    trained = np.arange(count) >= first
    return TrainPath(
        execution="e",
        group="g",
        role="main",
        leaf="l",
        token_ids=np.asarray(ids, np.int32),
        call=np.where(trained, 0, -1).astype(np.int32),
        index=np.where(trained, np.arange(count) - first, -1).astype(np.int32),
        old_logprobs=np.where(trained, -1.0, np.nan).astype(np.float32),
        versions=np.where(trained, 0, -1).astype(np.int32),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_at_the_samplers_temperature(tmp_path: Path, temperature: float) -> None:
    from transformers import AutoModelForCausalLM

    from gyre_backend.algorithms import make
    from gyre_backend.trainers.base import TrainerConfig
    from gyre_backend.trainers.hf import HFTrainer

    folder = tiny_dir(tmp_path / "m", seed=3)
    ids, first = [5, 9, 17, 33, 41, 60, 7, 12], 3
    trainer = HFTrainer(folder, TrainerConfig(temperature=temperature), make("grpo"))
    got = trainer.logprobs(build_plan([_path(ids, first)], {"e": 1.0}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    want = torch.tensor([rows[i - 1, ids[i]] for i in range(first, len(ids))])
    assert torch.allclose(got, want, atol=1e-5)
