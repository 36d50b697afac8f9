"""The trainer protocol: what a cell needs of whatever holds the weights and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gyre_backend.errors import UnsupportedError
from gyre_backend.tree.plan import TreePlan

if TYPE_CHECKING:
    import torch

    from gyre_backend.algorithms.batch import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Settings of every trainer. What only one of them knows is in `options`."""

    trainer: str = "hf"
    """hf | fsdp | megatron"""
    dtype: str = "float32"
    """of the weights, gradients and optimizer state: float32 | float64 | bfloat16"""
    autocast: str = ""
    """dtype of the matrix products when it is not the weights': bfloat16, or empty"""
    device: str = "cpu"
    attention: str = "auto"
    """attention back end: auto | rect | rows | dense | flash | flex"""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 0
    """optimizer steps over which the learning rate rises linearly from lr / warmup_steps"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm; 0 turns it off"""
    gradient_checkpointing: bool = False
    temperature: float = 1.0
    """the sampler's: logits are divided by it, so that ratios compare like with like"""
    logits_chunk: int = 1024
    """edges whose logits are held at once"""
    bounded_memory: bool = False
    """compute one segment at a time (`gyre_backend.tree.dfs`): memory of one path, some recomputation"""
    ref_model: str = ""
    """folder of the reference policy; needed by KL terms only"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepResult:
    """One forward-backward. `loss` is the sum over edges of weight * edge loss, before the division by N."""

    loss: float
    edges: int
    tokens: int
    """unique tokens computed"""
    flat_tokens: int
    """tokens that path-by-path training would have computed"""
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """means over edges"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step."""

    version: int
    """policy version of the weights now held"""
    num_executions: int
    grad_norm: float
    """after the division by N, before clipping"""
    lr: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class NamedBuffer:
    """A contiguous tensor that stays at its address for the trainer's life."""

    name: str
    tensor: torch.Tensor


class Trainer(Protocol):
    """Holds one full replica of the weights. Not thread-safe: one call at a time."""

    @property
    def version(self) -> int:
        """Policy version of the weights held."""
        ...

    def forward_backward(self, plan: TreePlan) -> MicroStepResult:
        """Add the plan's gradient to the buffers."""
        ...

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero in place."""
        ...

    def optimizer_step(self, num_executions: int) -> StepResult:
        """Divide the gradients by N, clip them by norm, update the weights, zero the gradients, version +
        1."""
        ...

    def named_weights(self) -> list[NamedBuffer]:
        """In a stable order."""
        ...

    def named_grads(self) -> list[NamedBuffer]:
        """In the order of `named_weights`."""
        ...

    def load_weights(self, version: int) -> None:
        """Tell the trainer that its weight buffers were overwritten in place with those of `version`."""
        ...

    def export_hf(self, path: Path) -> None:
        """Write a folder that an engine can load: safetensors, config and tokenizer files."""
        ...

    def save(self, path: Path) -> None:
        """Write a resumable checkpoint to the folder `path`, atomically: it is whole or it is not there."""
        ...

    def load(self, path: Path) -> None:
        """Continue from `save`'s checkpoint."""
        ...


def create(config: TrainerConfig, model_dir: Path, algorithm: Algorithm) -> Trainer:
    """The trainer that `config.trainer` names. Raises UnsupportedError for another name."""
    if config.trainer == "hf":
        from gyre_backend.trainers.hf import HFTrainer

        return HFTrainer(model_dir, config, algorithm)
    if config.trainer == "fsdp":
        from gyre_backend.trainers.fsdp import FSDPTrainer

        return FSDPTrainer(model_dir, config, algorithm)
    if config.trainer == "megatron":
        from gyre_backend.trainers.megatron import MegatronTrainer

        return MegatronTrainer(model_dir, config, algorithm)
    raise UnsupportedError(f"trainer = {config.trainer!r}: known trainers are hf, fsdp and megatron")


def merge_metrics(results: Sequence[MicroStepResult]) -> dict[str, float]:
    """Metrics of several micro-steps as one: means weighted by edges; names that end in `_max` take the
    maximum."""
    merged: dict[str, float] = {}
    weights: dict[str, int] = {}
    for result in results:
        for name, value in result.metrics.items():
            if name.endswith("_max"):
                merged[name] = max(merged.get(name, value), value)
                continue
            merged[name] = merged.get(name, 0.0) + value * result.edges
            weights[name] = weights.get(name, 0) + result.edges
    return {name: value / weights[name] if name in weights else value for name, value in merged.items()}
