"""HFTrainer: tree training of any transformers causal LM with full (or Gated DeltaNet) attention, in one
process."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre_backend.algorithms.batch import Algorithm, EdgeBatch
from gyre_backend.errors import TrainingError, UnsupportedError
from gyre_backend.trainers.base import MicroStepResult, NamedBuffer, StepResult, TrainerConfig
from gyre_backend.trainers.files import copy_companions, load_tensors, new_folder, save_tensors
from gyre_backend.trainers.hf_model import (
    DTYPES,
    enable_checkpointing,
    head_of,
    hidden_states,
    load_model,
    precision,
    quiet,
    segment_forward,
)
from gyre_backend.trainers.memory import keep_freed_memory
from gyre_backend.tree.dfs import dfs_step
from gyre_backend.tree.loss import edge_logprobs
from gyre_backend.tree.plan import TreePlan


class HFTrainer:
    """Implements `gyre_backend.trainers.base.Trainer`. Weights and gradients stay at their addresses for its
    life."""

    def __init__(self, model_dir: Path, config: TrainerConfig, algorithm: Algorithm, *, version: int = 0) -> None:
        """Load the model. Raises UnsupportedError for a model or setting that can't be trained exactly."""
        self.config, self.algorithm = config, algorithm
        self._model_dir = Path(model_dir)
        self._version = version
        self._steps = 0
        _refuse_settings(config)
        if config.device == "cpu":
            keep_freed_memory()
        where = {"dtype": config.dtype, "device": config.device, "attention": config.attention}
        self.model = load_model(self._model_dir, **where)
        if config.bounded_memory and self.model.gyre_recurrent_layers:
            raise UnsupportedError("trainer.bounded_memory: not for a model with recurrent layers")
        if config.gradient_checkpointing:
            enable_checkpointing(self.model)
        self._reference = (
            load_model(Path(config.ref_model), **where).requires_grad_(False) if config.ref_model else None
        )
        self._names = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        for name, weight in self._names:
            if not weight.is_contiguous():
                raise UnsupportedError(f"weight {name} is not contiguous")
            weight.grad = torch.zeros_like(weight)
        self._optimizer: torch.optim.AdamW | None = None

    @property
    def version(self) -> int:
        """Policy version of the weights held."""
        return self._version

    # --- the step ---

    def forward_backward(self, plan: TreePlan) -> MicroStepResult:
        """Add the plan's gradient to the buffers. Raises TrainingError if the loss is not finite (nothing is
        added then)."""
        started = time.perf_counter()
        with precision(self.model, self.config.autocast):
            loss, metrics = self._accumulate(plan)
        return MicroStepResult(
            loss=loss,
            edges=plan.num_edges,
            tokens=plan.num_tokens,
            flat_tokens=plan.flat_tokens,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )

    def _accumulate(self, plan: TreePlan) -> tuple[float, dict[str, float]]:
        if not plan.num_edges:
            return 0.0, {}
        if self.config.bounded_memory:
            return self._accumulate_by_segment(plan)
        hidden = hidden_states(self.model, plan)
        logp, entropy = edge_logprobs(
            hidden, head_of(self.model, self.config.temperature), plan, chunk=self.config.logits_chunk
        )
        batch = EdgeBatch.of(
            plan, logp, version=self._version, entropy=entropy, ref_logp=self._reference_logprobs(plan)
        )
        result = self.algorithm(batch)
        loss = self._finite(result.loss, plan)
        result.loss.backward()
        return loss, dict(result.metrics)

    def _finite(self, loss: torch.Tensor, plan: TreePlan) -> float:
        value = float(loss.detach())
        if not math.isfinite(value):
            where = f"a micro-step of {plan.num_edges} edges, version {self._version}"
            raise TrainingError(f"the loss is {value} in {where}")
        return value

    def _accumulate_by_segment(self, plan: TreePlan) -> tuple[float, dict[str, float]]:
        """The same in the memory of one path. A loss with a ratio per reply takes a pass for the ratios
        first."""
        parts = (segment_forward(self.model), head_of(self.model, self.config.temperature), plan)
        blank = torch.zeros(plan.num_edges, dtype=next(self.model.parameters()).dtype, device=self.config.device)
        whole = EdgeBatch.of(plan, blank, version=self._version, ref_logp=self._reference_logprobs(plan))
        chunk, slope = self.config.logits_chunk, None
        if self.algorithm.whole_replies:
            logp, _ = dfs_step(*parts, _no_loss, chunk=chunk, train=False)
            logp.requires_grad_()
            slope = torch.autograd.grad(self.algorithm(replace(whole, logp=logp)).loss, logp)[0]

        def loss_of(edges: np.ndarray, logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            index = torch.from_numpy(edges).to(logp.device)
            if slope is not None:
                return (slope[index] * logp).sum()
            return self.algorithm(whole.part(index, logp)).loss

        logp, entropy = dfs_step(*parts, loss_of, chunk=chunk)
        result = self.algorithm(replace(whole, logp=logp, entropy=entropy))
        return self._finite(result.loss, plan), dict(result.metrics)

    def _reference_logprobs(self, plan: TreePlan) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            hidden = hidden_states(self._reference, plan)
            return edge_logprobs(
                hidden, head_of(self._reference, self.config.temperature), plan, chunk=self.config.logits_chunk
            )[0]

    def logprobs(self, plan: TreePlan) -> torch.Tensor:
        """[E] log-probability of every edge at the weights held, without gradient."""
        with torch.no_grad(), precision(self.model, self.config.autocast):
            hidden = hidden_states(self.model, plan)
            return edge_logprobs(
                hidden, head_of(self.model, self.config.temperature), plan, chunk=self.config.logits_chunk
            )[0]

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero in place."""
        torch._foreach_zero_([weight.grad for _, weight in self._names])

    def optimizer_step(self, num_executions: int) -> StepResult:
        """Divide the gradients by N, clip them by norm, AdamW, zero the gradients, version + 1.

        Raises TrainingError for N < 1, or a gradient norm that is not finite (weights and version stay as
        they are).
        """
        started = time.perf_counter()
        if num_executions < 1:
            raise TrainingError(f"an optimizer step needs at least one valid execution, got {num_executions}")
        grads = [weight.grad for _, weight in self._names]
        torch._foreach_mul_(grads, 1.0 / num_executions)
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm} at version {self._version}; the step was not taken")
        if 0.0 < self.config.max_grad_norm < norm:
            torch._foreach_mul_(grads, self.config.max_grad_norm / norm)
        lr = self._learning_rate()
        optimizer = self._adamw()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        self.zero_grad()
        self._steps += 1
        self._version += 1
        return StepResult(
            version=self._version,
            num_executions=num_executions,
            grad_norm=norm,
            lr=lr,
            seconds=time.perf_counter() - started,
        )

    def _learning_rate(self) -> float:
        warmup = self.config.warmup_steps
        return self.config.lr * min(1.0, (self._steps + 1) / warmup) if warmup else self.config.lr

    def _adamw(self) -> torch.optim.AdamW:
        """Made at the first step: only the core cell ever has optimizer state. Vectors (norms, biases) don't
        decay."""
        if self._optimizer is None:
            matrices = [weight for _, weight in self._names if weight.ndim >= 2]
            vectors = [weight for _, weight in self._names if weight.ndim < 2]
            groups: list[dict[str, Any]] = [
                {"params": matrices, "weight_decay": self.config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
            self._optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=self.config.lr,
                betas=self.config.betas,
                eps=self.config.eps,
                fused=self.config.device == "cpu",
            )
        return self._optimizer

    # --- buffers ---

    def named_weights(self) -> list[NamedBuffer]:
        """Every trained tensor once (tied ones under their first name), in the model's order."""
        return [NamedBuffer(name, weight.data) for name, weight in self._names]

    def named_grads(self) -> list[NamedBuffer]:
        """In the order of `named_weights`."""
        return [NamedBuffer(name, weight.grad) for name, weight in self._names]

    def load_weights(self, version: int) -> None:
        """The weight buffers were overwritten in place with those of `version`."""
        self._version = version

    # --- files ---

    def export_hf(self, path: Path) -> None:
        """A folder that an engine can load: weights in the trainer's dtype, config, tokenizer files."""
        with new_folder(Path(path)) as folder, quiet():
            self.model.save_pretrained(folder)
            copy_companions(self._model_dir, folder)

    def save(self, path: Path) -> None:
        """Weights, optimizer state, version and step count; sharded safetensors, atomic."""
        tensors = {f"weight.{name}": weight.data for name, weight in self._names}
        if self._optimizer is not None:
            for name, weight in self._names:
                tensors |= {f"{key}.{name}": value for key, value in self._optimizer.state[weight].items()}
        with new_folder(Path(path)) as folder:
            save_tensors(folder, tensors, {"version": self._version, "steps": self._steps, "dtype": self.config.dtype})

    def load(self, path: Path) -> None:
        """Continue from `save`'s folder. Raises TrainingError if it belongs to another model or dtype."""
        tensors, state = load_tensors(Path(path))
        held = {f"weight.{name}": weight.shape for name, weight in self._names}
        found = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("weight.")}
        if held != found or state["dtype"] != self.config.dtype:
            raise TrainingError(f"the checkpoint {path} is of another model or dtype than {self._model_dir}")
        self._version, self._steps = int(state["version"]), int(state["steps"])
        self._optimizer = None
        with torch.no_grad():
            for name, weight in self._names:
                weight.copy_(tensors[f"weight.{name}"])
        self.zero_grad()
        keys = ("step", "exp_avg", "exp_avg_sq")
        if f"{keys[0]}.{self._names[0][0]}" in tensors:
            optimizer = self._adamw()
            for name, weight in self._names:
                optimizer.state[weight] = {key: tensors[f"{key}.{name}"].to(_place(key, weight)) for key in keys}


def _no_loss(edges: np.ndarray, logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return logp.sum() * 0.0


def _place(key: str, weight: torch.Tensor) -> torch.device:
    """AdamW keeps its step counter on the CPU."""
    return torch.device("cpu") if key == "step" else weight.device


def _refuse_settings(config: TrainerConfig) -> None:
    for name, value in config.options.items():
        if name in ("context_parallel", "tensor_parallel", "pipeline_parallel") and value == 1:
            continue
        raise UnsupportedError(f"trainer.options.{name} = {value}: the hf trainer has no such setting")
    if config.autocast and config.autocast not in DTYPES:
        raise UnsupportedError(f"trainer.autocast = {config.autocast!r}: wanted bfloat16 or nothing")
