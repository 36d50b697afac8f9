"""Recorded executions of chosen shape, as records of real branch graphs, for the training benchmarks.

An execution is `turns` calls over one growing history. Each reply is thinking plus an answer; the harness
keeps the answer and drops the thinking, as chat templates of reasoning models do, so every turn ends in a
leaf of its own: history, thinking, answer. The executions of a group share the task's prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire.records import Delivered, Intent, Opened, Outcome, Record, Result, Sealed, Span


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens."""

    executions: int
    turns: int
    prompt: int
    thinking: int
    answer: int
    observation: int
    shared_prompt: bool = True

    @property
    def flat(self) -> int:
        """Tokens of all paths of a group."""
        per_turn = self.answer + self.observation
        paths = self.turns * (self.prompt + self.thinking + self.answer) + per_turn * self.turns * (self.turns - 1) // 2
        return self.executions * paths

    @property
    def unique(self) -> int:
        """Tokens of the group's prefix tree."""
        own = (self.turns - 1) * (self.answer + self.observation) + self.turns * (self.thinking + self.answer)
        prompts = 1 if self.shared_prompt else self.executions
        return prompts * self.prompt + self.executions * own

    @property
    def sharing(self) -> float:
        """1 - unique / flat."""
        return 1.0 - self.unique / self.flat


def shape_for(sharing: float, flat: int) -> Shape:
    """A shape of about `flat` flattened tokens per group and that sharing: thinking is made as long as it
    takes."""
    if sharing == 0.0:
        return Shape(4, 1, flat // 8, flat // 16, flat // 16, 0, shared_prompt=False)
    executions, turns = {0.5: (2, 3), 0.65: (2, 4), 0.8: (2, 10), 0.88: (1, 20)}[sharing]

    def sized(unit: float, thinking: float) -> Shape:
        prompt, answer, observation = (max(1, round(unit * part)) for part in (12.0, 0.5, 3.0))
        return Shape(executions, turns, prompt, max(1, round(unit * thinking)), answer, observation)

    low, high = 0.01, 100.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sized(1000.0, middle).sharing > sharing else (low, middle)
    return sized(1000.0 * flat / sized(1000.0, low).flat, low)


def recorded_group(shape: Shape, *, seed: int, vocabulary: int, group: str = "g") -> list[BranchGraph]:
    """The group's sealed graphs, with different rewards."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocabulary, shape.prompt)
    graphs = []
    for number in range(shape.executions):
        own = prompt if shape.shared_prompt else rng.integers(0, vocabulary, shape.prompt)
        reward = number / max(1, shape.executions - 1)
        graphs.append(_execution(f"{group}{number}", group, own, shape, reward, rng, vocabulary))
    return graphs


def _execution(
    name: str,
    group: str,
    prompt: np.ndarray,
    shape: Shape,
    reward: float,
    rng: np.random.Generator,
    vocabulary: int,
) -> BranchGraph:
    records: list[Record] = [Opened(execution=name, at=0.0, group=group)]
    delta, length = prompt, 0
    for call in range(shape.turns):
        base = {"base_call": call - 1, "base_len": length} if call else {}
        length += len(delta)
        at = float(call)
        records.append(Intent(call=call, at=at, dialect="benchmark", delta=_bytes(delta), **base))
        output = rng.integers(0, vocabulary, shape.thinking + shape.answer)
        logprobs = np.full(len(output), -np.log(vocabulary), "<f4").tobytes()
        spans = (Span(0, 0, len(output)),)
        records.append(
            Result(call=call, at=at + 0.5, ids=_bytes(output), logprobs=logprobs, versions=spans, finish="stop")
        )
        records.append(Delivered(call=call, at=at + 0.6, complete=True))
        delta = np.concatenate([output[shape.thinking :], rng.integers(0, vocabulary, shape.observation)])
    outcome = Outcome(status="completed", reward=reward, valid=True)
    records.append(Sealed(at=float(shape.turns), outcome=outcome))
    return BranchGraph.replay(records)


def _bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4").tobytes()
