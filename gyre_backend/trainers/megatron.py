"""The Megatron-core trainer: one object that drives all ranks of a tensor-, pipeline- and data-parallel run.

It speaks Hugging Face at its borders: it starts from a safetensors folder, its weights and gradients are
named and shaped as there, and it exports such a folder. Between, the model lives on the ranks
(`megatron_launch`). Whole-model weights and gradients exist here only once asked for, in memory that the
ranks share.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from gyre_backend.algorithms.batch import Algorithm, EdgeBatch
from gyre_backend.errors import TrainingError, UnsupportedError
from gyre_backend.trainers import megatron_layout, megatron_weights
from gyre_backend.trainers.base import MicroStepResult, NamedBuffer, StepResult, TrainerConfig
from gyre_backend.trainers.files import copy_companions, new_folder
from gyre_backend.trainers.megatron_launch import Ranks, SharedTensors
from gyre_backend.trainers.megatron_replica import DTYPES, Edges, Setup, Shared
from gyre_backend.tree.plan import TreePlan, plan_to_bytes
from gyre_sdk.errors import MissingExtraError

_FORMAT: Final = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """`TrainerConfig.options` of this trainer."""

    tp: int = 1
    """tensor-parallel ranks"""
    pp: int = 1
    """pipeline stages"""
    dp: int = 1
    """data-parallel replicas inside this trainer (cells are replicas of a higher order)"""
    recompute: str = "none"
    """none | selective (attention) | full (every layer); `gradient_checkpointing` means full"""
    distributed_optimizer: bool = True
    """optimizer state split over the replicas"""
    micro_batches: int = 0
    """parts a plan is cut into per replica; 0: as many as there are pipeline stages"""

    @classmethod
    def of(cls, config: TrainerConfig) -> MegatronOptions:
        """Raises UnsupportedError for an unknown option and for settings this trainer can't honour."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(config.options) - known)
        if unknown:
            raise UnsupportedError(
                f"options of the megatron trainer: unknown {unknown}; known: {', '.join(sorted(known))}"
            )
        options = cls(**config.options)
        for name in ("tp", "pp", "dp"):
            if getattr(options, name) < 1:
                raise UnsupportedError(f"{name} = {getattr(options, name)}: must be at least 1")
        if config.autocast:
            raise UnsupportedError("autocast: the megatron trainer uses dtype = 'bfloat16' (with float32 main weights)")
        if config.bounded_memory:
            raise UnsupportedError("bounded_memory: use options.recompute = 'full' with the megatron trainer")
        if config.ref_model:
            raise UnsupportedError("ref_model: KL terms against a reference policy need the hf trainer")
        if config.dtype not in DTYPES:
            raise UnsupportedError(f"dtype = {config.dtype!r}: expected one of {', '.join(DTYPES)}")
        return options


class MegatronTrainer:
    """See `gyre_backend.trainers.base.Trainer`. Call `close()` at the end, or use it as a context manager."""

    def __init__(self, model_dir: Path, config: TrainerConfig, algorithm: Algorithm) -> None:
        """Starts tp * pp * dp processes and loads the model into them.

        Raises UnsupportedError, before anything is started, for a model or setting that can't be exact.
        """
        from transformers import AutoConfig

        self._options = options = MegatronOptions.of(config)
        self._hf = AutoConfig.from_pretrained(model_dir)
        megatron_layout.refuse(self._hf, tp=options.tp, pp=options.pp)
        if importlib.util.find_spec("megatron") is None:
            raise MissingExtraError("megatron-core", "megatron")
        self._shapes = megatron_weights.hf_shapes(self._hf)
        self._model_dir = Path(model_dir)
        self._config = config
        self._algorithm = algorithm
        self._version = 0
        self._steps = 0
        self._shared: dict[str, SharedTensors] = {}
        recompute = "full" if config.gradient_checkpointing and options.recompute == "none" else options.recompute
        self._ranks = Ranks(
            options.tp * options.pp * options.dp,
            Setup(
                model_dir=str(model_dir),
                tp=options.tp,
                pp=options.pp,
                dp=options.dp,
                dtype=config.dtype,
                device=config.device,
                recompute=recompute,
                distributed_optimizer=options.distributed_optimizer,
                backend=config.attention,
                chunk=config.logits_chunk,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                clip=config.max_grad_norm,
                algorithm=algorithm,
            ),
        )

    def __enter__(self) -> MegatronTrainer:
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
        return {"trainer": "megatron", **dataclasses.asdict(self._options)}

    # --- a micro-step ---

    def forward_backward(self, plan: TreePlan) -> MicroStepResult:
        """Add the plan's gradient. The plan is cut for the replicas and, in each, for the pipeline."""
        started = time.monotonic()
        parts = self._cut(plan)
        edges = self._collect(plan, parts, self._call_parts("forward_backward", parts, self._version))
        logp, entropy = torch.from_numpy(edges.logp), torch.from_numpy(edges.entropy)
        batch = EdgeBatch.of(plan, logp, version=self._version, entropy=entropy)
        result = self._algorithm(batch)
        return MicroStepResult(
            loss=float(result.loss),
            edges=plan.num_edges,
            tokens=sum(part.num_tokens for replica in parts for part in replica),
            flat_tokens=plan.flat_tokens,
            seconds=time.monotonic() - started,
            metrics=result.metrics,
        )

    def logprobs(self, plan: TreePlan) -> np.ndarray:
        """float64[E]: log-probability of each edge's token under the weights held (a proximal policy's)."""
        parts = self._cut(plan)
        return self._collect(plan, parts, self._call_parts("logprobs", parts)).logp

    def _cut(self, plan: TreePlan) -> list[list[TreePlan]]:
        return [[plan]] + [[] for _ in range(self._options.dp - 1)]

    def _call_parts(self, op: str, parts: list[list[TreePlan]], *args: Any) -> list[list[Edges]]:
        encoded = [[plan_to_bytes(part) for part in replica] for replica in parts]
        # megatron-core numbers ranks with tensor parallelism fastest, then data, then pipeline.
        tp, dp = self._options.tp, self._options.dp
        replica_of = [(rank // tp) % dp for rank in range(self._ranks.world)]
        answers = self._ranks.call(op, *args, each=[encoded[replica] for replica in replica_of])
        results: list[list[Edges]] = [[] for _ in range(dp)]
        for rank, answer in enumerate(answers):
            if answer:
                results[replica_of[rank]] = answer
        return results

    def _collect(self, plan: TreePlan, parts: list[list[TreePlan]], results: list[list[Edges]]) -> Edges:
        """The parts' edges in the plan's order, matched by (execution, call, index)."""
        place = {key: i for i, key in enumerate(_keys(plan))}
        logp, entropy = np.full(plan.num_edges, np.nan), np.full(plan.num_edges, np.nan)
        for replica, answers in zip(parts, results, strict=True):
            for part, edges in zip(replica, answers, strict=True):
                at = [place[key] for key in _keys(part)]
                logp[at], entropy[at] = edges.logp, edges.entropy
        if np.isnan(logp).any():
            raise TrainingError("some edges of the plan came back without a log-probability")
        return Edges(logp, entropy)

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

    def export_hf(self, path: Path) -> None:
        """Write a folder that an engine or transformers can load: bitwise the ranks' weights."""
        from safetensors.torch import save_file

        with new_folder(Path(path)) as folder:
            tensors = {buffer.name: buffer.tensor for buffer in self.named_weights()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            copy_companions(self._model_dir, folder)

    def save(self, path: Path) -> None:
        """One shard per rank and a description, renamed into place when all is on disk."""
        with new_folder(Path(path)) as folder:
            self._ranks.call("save", str(folder))
            state = {
                "format": _FORMAT,
                "version": self._version,
                "steps": self._steps,
                "layout": self._layout(),
            }
            (folder / "trainer.json").write_text(json.dumps(state, indent=1))

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of `save`. Raises TrainingError if another arrangement wrote it."""
        path = Path(path)
        try:
            state = json.loads((path / "trainer.json").read_text())
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path} is no checkpoint of the megatron trainer: {error}") from error
        if state.get("format") != _FORMAT or state["layout"] != self._layout():
            raise TrainingError(f"{path} was saved with {state.get('layout')}, this trainer is {self._layout()}")
        self._ranks.call("load", str(path))
        self._version, self._steps = state["version"], state["steps"]

    def _layout(self) -> dict[str, Any]:
        names = ("tp", "pp", "dp", "distributed_optimizer")
        return {"dtype": self._config.dtype, **{name: getattr(self._options, name) for name in names}}


def _keys(plan: TreePlan) -> list[tuple[str, int, int]]:
    rows = zip(plan.edge_exec.tolist(), plan.edge_call.tolist(), plan.edge_index.tolist(), strict=True)
    return [(plan.executions[execution], call, index) for execution, call, index in rows]
