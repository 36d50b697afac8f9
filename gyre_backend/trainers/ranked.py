"""What trainers on several processes share: they cut plans, drive ranks, and keep whole-model tensors.

Such a trainer speaks Hugging Face at its borders: its weights and gradients are named and shaped as there.
Between, the model lives on the ranks (`ranks`). Whole-model weights and gradients exist here only once asked
for, in memory that the ranks share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from gyre_backend.algorithms.batch import Algorithm, EdgeBatch
from gyre_backend.errors import TrainingError, UnsupportedError
from gyre_backend.trainers.base import MicroStepResult, NamedBuffer, StepResult, TrainerConfig
from gyre_backend.trainers.files import new_folder
from gyre_backend.trainers.ranks import Edges, Ranks, Shared, SharedTensors
from gyre_backend.trainers.skeleton import module_over
from gyre_backend.tree.cost import CostModel
from gyre_backend.tree.plan import TreePlan, plan_to_bytes
from gyre_backend.tree.split import balance

DTYPES: Final = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_FORMAT: Final = 1


class RankedTrainer:
    """See `gyre_backend.trainers.base.Trainer`. Call `close()` at the end, or use it as a context manager."""

    def __init__(
        self,
        model_dir: Path,
        config: TrainerConfig,
        algorithm: Algorithm,
        *,
        hf: Any,
        replica: str,
        setup: Any,
        shapes: Mapping[str, tuple[int, ...]],
        replica_of: tuple[int, ...],
        micro_batches: int,
        cost: CostModel,
        layout: Mapping[str, Any],
    ) -> None:
        """Starts one process per entry of `replica_of`, which says whose plans that rank works on.

        `shapes`: name -> shape of every trained tensor; `layout`: what a checkpoint must agree on to be
        resumed.
        """
        refuse_device(config.device, len(replica_of))
        self._model_dir = Path(model_dir)
        self._hf = hf
        self._module: Any = None
        self._config = config
        self._algorithm = algorithm
        self._shapes = shapes
        self._replica_of = replica_of
        self._micro_batches = micro_batches
        self._cost = cost
        self._layout = {"dtype": config.dtype, **layout}
        self._version = 0
        self._steps = 0
        self._shared: dict[str, SharedTensors] = {}
        self._ranks = Ranks(len(replica_of), replica, setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks. Safe to call twice."""
        self._ranks.close()
        for shared in self._shared.values():
            shared.close()

    @property
    def version(self) -> int:
        """Policy version of the weights held."""
        return self._version

    @property
    def metadata(self) -> dict[str, Any]:
        """How the run is laid out, for logs."""
        return {"trainer": self._config.trainer, **self._layout}

    @property
    def model(self) -> Any:
        """A transformers module whose parameters are `named_weights`: what an engine in this process generates with.

        Optimizer steps write into it. AttributeError for a model whose checkpoint names its tensors otherwise than
        its module does (experts).
        """
        if self._module is None:
            tensors = {buffer.name: buffer.tensor for buffer in self.named_weights()}
            try:
                self._module = module_over(self._hf, DTYPES[self._config.dtype], tensors)
            except UnsupportedError as error:
                raise AttributeError(f"this trainer has no `model`: {error}") from error
        return self._module

    # --- a micro-step ---

    def forward_backward(self, plan: TreePlan) -> MicroStepResult:
        """Add the plan's gradient. The plan is cut for the replicas and, in each, for the pipeline."""
        started = time.monotonic()
        parts = self._cut(plan)
        if plan.num_edges:
            edges = self._collect(plan, parts, self._call_parts("forward_backward", parts, self._version))
        else:
            edges = Edges(np.zeros(0), np.zeros(0), np.zeros(0) if self._config.ref_model else None)
        logp, entropy = torch.from_numpy(edges.logp), torch.from_numpy(edges.entropy)
        ref_logp = None if edges.ref_logp is None else torch.from_numpy(edges.ref_logp)
        batch = EdgeBatch.of(plan, logp, version=self._version, entropy=entropy, ref_logp=ref_logp)
        result = self._algorithm(batch)
        return MicroStepResult(
            loss=float(result.loss),
            edges=plan.num_edges,
            tokens=sum(part.num_tokens for replica in parts for part in replica),
            flat_tokens=plan.flat_tokens,
            seconds=time.monotonic() - started,
            metrics=result.metrics,
        )

    def logprobs(self, plan: TreePlan) -> torch.Tensor:
        """float64[E]: log-probability of each edge's token under the weights held (a proximal policy's)."""
        parts = self._cut(plan)
        return torch.from_numpy(self._collect(plan, parts, self._call_parts("logprobs", parts)).logp)

    def _cut(self, plan: TreePlan) -> list[list[TreePlan]]:
        """Parts of about equal cost, in depth-first order; each replica takes the same number of neighbours."""
        replicas, each = max(self._replica_of) + 1, self._micro_batches
        if replicas * each == 1:
            return [[plan]]
        whole = self._algorithm.whole_replies
        shares = balance(plan, replicas * each, self._cost, whole_replies=whole)
        return [
            [part for share in shares[first * each : (first + 1) * each] for part in share] for first in range(replicas)
        ]

    def _call_parts(self, op: str, parts: list[list[TreePlan]], *args: Any) -> list[list[Edges]]:
        encoded = [[plan_to_bytes(part) for part in replica] for replica in parts]
        answers = self._ranks.call(op, *args, each=[encoded[replica] for replica in self._replica_of])
        results: list[list[Edges]] = [[] for _ in parts]
        for rank, answer in enumerate(answers):
            if answer:
                results[self._replica_of[rank]] = answer
        return results

    def _collect(self, plan: TreePlan, parts: list[list[TreePlan]], results: list[list[Edges]]) -> Edges:
        """The parts' edges in the plan's order, matched by (execution, call, index)."""
        place = {key: i for i, key in enumerate(_keys(plan))}
        logp, entropy, ref_logp = (np.full(plan.num_edges, np.nan) for _ in range(3))
        for replica, answers in zip(parts, results, strict=True):
            for part, edges in zip(replica, answers, strict=True):
                at = [place[key] for key in _keys(part)]
                logp[at], entropy[at] = edges.logp, edges.entropy
                if edges.ref_logp is not None:
                    ref_logp[at] = edges.ref_logp
        if np.isnan(logp).any():
            raise TrainingError("some edges of the plan came back without a log-probability")
        return Edges(logp, entropy, None if np.isnan(ref_logp).any() else ref_logp)

    def peak_memory(self) -> list[int]:
        """Bytes by rank, once all have finished what they were given; see `ranks.peak_memory`."""
        return self._ranks.call("peak_memory")

    # --- a step ---

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self._ranks.call("zero_grad")

    def optimizer_step(self, num_executions: int) -> StepResult:
        """Divide the gradients by N, clip them, update the weights, zero the gradients, version + 1."""
        if num_executions < 1:
            raise TrainingError(f"an optimizer step over {num_executions} executions")
        started = time.monotonic()
        warmup = self._config.warmup_steps
        lr = self._config.lr * min(1.0, (self._steps + 1) / warmup) if warmup else self._config.lr
        norm = self._ranks.call("step", num_executions, lr)[0]
        self._version += 1
        self._steps += 1
        return StepResult(
            version=self._version,
            num_executions=num_executions,
            grad_norm=norm,
            lr=lr,
            seconds=time.monotonic() - started,
        )

    # --- whole-model tensors ---

    def named_weights(self) -> list[NamedBuffer]:
        """Hugging Face tensors in shared memory; kept up to date by every optimizer step."""
        if "weights" not in self._shared:
            self._share("weights", DTYPES[self._config.dtype])
            self._ranks.call("publish")
        return self._buffers("weights")

    def named_grads(self) -> list[NamedBuffer]:
        """Hugging Face tensors that hold the gradient accumulated so far; what is added to them counts.

        In float32, or float64 for float64 weights. Each call moves what the ranks have gathered since.
        """
        if "grads" not in self._shared:
            self._share("grads", torch.float64 if self._config.dtype == "float64" else torch.float32)
        self._ranks.call("spill")
        return self._buffers("grads")

    def load_weights(self, version: int) -> None:
        """Take the weights that were written into `named_weights`."""
        if "weights" not in self._shared:
            raise TrainingError("load_weights: nothing was written, named_weights has not been called")
        self._ranks.call("reload")
        self._version = version

    def _share(self, kind: str, dtype: torch.dtype) -> None:
        shared = SharedTensors(self._shapes, dtype)
        self._shared[kind] = shared
        self._ranks.call("share", kind, Shared(shared.shapes, dtype, shared.path))

    def _buffers(self, kind: str) -> list[NamedBuffer]:
        return [NamedBuffer(name, tensor) for name, tensor in self._shared[kind].tensors.items()]

    # --- disk ---

    def save(self, path: Path) -> None:
        """One shard per rank and a description, renamed into place when all is on disk."""
        with new_folder(Path(path)) as folder:
            self._ranks.call("save", str(folder))
            state = {
                "format": _FORMAT,
                "version": self._version,
                "steps": self._steps,
                "layout": self._layout,
            }
            (folder / "trainer.json").write_text(json.dumps(state, indent=1))

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of `save`. Raises TrainingError if another arrangement wrote it."""
        path = Path(path)
        try:
            state = json.loads((path / "trainer.json").read_text())
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path} is no checkpoint of this trainer: {error}") from error
        if state.get("format") != _FORMAT or state["layout"] != self._layout:
            raise TrainingError(f"{path} was saved with {state.get('layout')}, this trainer is {self._layout}")
        self._ranks.call("load", str(path))
        self._version, self._steps = state["version"], state["steps"]


def refuse_device(device: str, ranks: int) -> None:
    """Raise UnsupportedError unless every rank finds a device of its own."""
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"device = {device!r}: trainers on several ranks take cpu or cuda (a device per rank)")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise UnsupportedError(f"{ranks} ranks want {ranks} CUDA devices, here are {torch.cuda.device_count()}")


def _keys(plan: TreePlan) -> list[tuple[str, int, int]]:
    rows = zip(plan.edge_exec.tolist(), plan.edge_call.tolist(), plan.edge_index.tolist(), strict=True)
    return [(plan.executions[execution], call, index) for execution, call, index in rows]
