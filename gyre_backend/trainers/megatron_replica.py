"""What one rank of a Megatron run holds and does: its part of model and optimizer, and every operation.

All ranks run every operation at the same time. Each data-parallel replica gets plans of its own; inside a
replica, the stages of a pipeline take the plans as micro-batches (1F1B).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gyre_backend.algorithms.batch import Algorithm, EdgeBatch
from gyre_backend.errors import TrainingError
from gyre_backend.trainers import cpu_shims, megatron_weights
from gyre_backend.trainers.base import TrainerConfig
from gyre_backend.trainers.megatron_layout import Shape, padded_vocab
from gyre_backend.trainers.memory import keep_freed_memory
from gyre_backend.trainers.ranked import DTYPES
from gyre_backend.trainers.ranks import Edges, Shared, SharedTensors, edges_of, peak_memory
from gyre_backend.tree.plan import TreePlan, plan_from_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a rank is built from."""

    model_dir: str
    shape: Shape
    ref_shape: Shape | None
    """of `config.ref_model`; must split as `shape` does"""
    tp: int
    pp: int
    dp: int
    recompute: str
    """none, selective or full"""
    distributed_optimizer: bool
    config: TrainerConfig
    algorithm: Algorithm


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors folder, each read from disk when asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise TrainingError(f"{folder} holds no *.safetensors file")
        self._where: dict[str, Any] = {}
        for file in files:
            handle: Any = safe_open(file, "pt")
            self._where |= dict.fromkeys(handle.keys(), handle)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


class Replica:
    """This rank's state. Built once per process: megatron-core keeps its groups in globals."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rank = int(os.environ["RANK"])
        self.dtype = DTYPES[setup.config.dtype]
        self.device = torch.device("cpu")
        if setup.config.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            keep_freed_memory()
            cpu_shims.install()
        self._shared: dict[str, SharedTensors] = {}
        self._join()
        self._build()

    def _join(self) -> None:
        from megatron.core import parallel_state

        setup = self.setup
        world = setup.tp * setup.pp * setup.dp
        dist.init_process_group(
            "nccl" if setup.config.device == "cuda" else "gloo",
            init_method=f"file://{os.environ['GYRE_RENDEZVOUS']}",
            rank=self.rank,
            world_size=world,
        )
        parallel_state.initialize_model_parallel(setup.tp, setup.pp)
        if setup.config.device == "cuda":
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(0)
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.last_stage = parallel_state.is_pipeline_last_stage()

    def _build(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from gyre_backend.trainers.megatron_model import build_model

        setup = self.setup
        hf = setup.shape
        with cpu_shims.cpu_as_cuda():
            self.model, config = build_model(
                hf, dtype=self.dtype, recompute=setup.recompute, device=setup.config.device
            )
            padded = padded_vocab(hf, setup.tp)
            geometry = megatron_weights.Geometry.of(hf, tp_rank=self.tp_rank, tp=setup.tp, padded_vocab=padded)
            self.held = megatron_weights.held(self.model, geometry)
            for item in self.held:
                # megatron-core sets this when it initialises weights itself; the gradient's norm relies on it.
                item.parameter.tensor_model_parallel = item.split
            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=setup.distributed_optimizer,
                grad_reduce_in_fp32=self.dtype != torch.float64,
            )
            self.ddp = DistributedDataParallel(config, ddp, self.model)
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=setup.config.lr,
                    weight_decay=setup.config.weight_decay,
                    adam_beta1=setup.config.betas[0],
                    adam_beta2=setup.config.betas[1],
                    adam_eps=setup.config.eps,
                    clip_grad=0.0,  # clipped here, in the gradient's own precision
                    bf16=self.dtype == torch.bfloat16,
                    params_dtype=self.dtype,
                    use_distributed_optimizer=setup.distributed_optimizer,
                ),
                [self.ddp],
            )
            self.reference = self._reference(geometry) if setup.ref_shape is not None else None
        self.pull(Checkpoint(Path(setup.model_dir)))
        self.zero_grad()

    def _reference(self, geometry: megatron_weights.Geometry) -> Any:
        """The reference policy, split as the model is, frozen."""
        from gyre_backend.trainers.megatron_model import build_model

        assert self.setup.ref_shape is not None
        model, _ = build_model(self.setup.ref_shape, dtype=self.dtype, device=self.setup.config.device)
        held = megatron_weights.held(model, geometry)
        megatron_weights.pull(held, Checkpoint(Path(self.setup.config.ref_model)))
        return model.requires_grad_(False)

    # --- a micro-step ---

    def forward_backward(self, version: int, plans: Sequence[bytes]) -> list[Edges] | None:
        """Add the gradients of this replica's plans. The last stage's first rank answers, others say None."""
        decoded = [plan_from_bytes(plan) for plan in plans]
        refs: list[Edges] = []
        if self.reference is not None:
            refs = self._run(decoded, self.reference, backward=False)
        return self._answer(self._run(decoded, self.ddp, version=version, refs=refs))

    def logprobs(self, plans: Sequence[bytes]) -> list[Edges] | None:
        """As `forward_backward`, without gradients."""
        return self._answer(self._run([plan_from_bytes(plan) for plan in plans], self.ddp, backward=False))

    def _answer(self, edges: list[Edges]) -> list[Edges] | None:
        return edges if self.last_stage and self.tp_rank == 0 else None

    def _run(
        self,
        plans: list[TreePlan],
        model: Any,
        *,
        version: int = 0,
        refs: Sequence[Edges] = (),
        backward: bool = True,
    ) -> list[Edges]:
        """Each plan's edges on the last stage's ranks; elsewhere nothing."""
        if not plans:
            return []
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with cpu_shims.cpu_as_cuda():
            results: list[Edges] = get_forward_backward_func()(
                forward_step_func=functools.partial(self._forward_step, version=version, backward=backward),
                data_iterator=iter(itertools.zip_longest(plans, refs)),
                model=[model],
                num_microbatches=len(plans),
                seq_length=max(plan.num_tokens for plan in plans),
                micro_batch_size=1,
                forward_only=not backward,
            )
        return results

    def _forward_step(
        self, plans: Iterator[tuple[TreePlan, Edges | None]], model: Any, *, version: int, backward: bool
    ) -> tuple[torch.Tensor, Any]:
        plan, ref = next(plans)
        packed = self._packed(plan)
        ids = torch.from_numpy(plan.ids.astype(np.int64)).to(self.device)[None]
        output = model(ids, packed.positions[None], None, packed_seq_params=packed)

        def loss_of(logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Edges]:
            entropy = torch.cat(packed.entropy)
            ref_logp = None if ref is None else torch.from_numpy(ref.logp).to(logp)
            loss = logp.sum()  # of a forward alone: never used
            if backward:
                batch = EdgeBatch.of(plan, logp, version=version, entropy=entropy, ref_logp=ref_logp)
                loss = self.setup.algorithm(batch).loss
                if not torch.isfinite(loss):
                    raise TrainingError(f"the loss of a micro-step of {plan.num_edges} edges is {float(loss)}")
            return loss, torch.ones((), dtype=torch.int, device=self.device), edges_of(logp, entropy, ref_logp)

        return output, loss_of

    def _packed(self, plan: TreePlan) -> Any:
        from gyre_backend.trainers.megatron_model import TreePacked

        index = {
            name: torch.from_numpy(getattr(plan, field).astype(np.int64)).to(self.device)
            for name, field in (("positions", "pos"), ("src", "edge_src"), ("tgt", "edge_tgt"))
        }
        return TreePacked(
            qkv_format="sbhd",
            max_seqlen_q=plan.num_tokens,
            max_seqlen_kv=plan.num_tokens,
            plan=plan,
            backend=self.setup.config.attention,
            chunk=self.setup.config.logits_chunk,
            temperature=self.setup.config.temperature,
            **index,
        )

    # --- a step ---

    def zero_grad(self) -> None:
        """Set this rank's gradients, and the shared ones if it is the first rank, to zero."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.rank == 0 and "grads" in self._shared:
            for tensor in self._shared["grads"].tensors.values():
                tensor.zero_()
        dist.barrier()

    def step(self, num_executions: int, lr: float) -> float:
        """Divide by N, reduce, clip, update, zero. Returns the norm before clipping."""
        from megatron.core.distributed import finalize_model_grads

        if "grads" in self._shared:
            megatron_weights.take_grads(
                self.held, self._shared["grads"].tensors, tp_rank=self.tp_rank, dp_rank=self.dp_rank
            )
        self.ddp.scale_gradients(1.0 / num_executions)
        with cpu_shims.cpu_as_cuda():
            finalize_model_grads([self.ddp])
            self.optimizer.prepare_grads()
            norm = self._clip()
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step_with_ready_grads()
        self.zero_grad()
        if "weights" in self._shared:
            self.publish()
        return norm

    def _clip(self) -> float:
        """Global norm over every parameter once; scales what the optimizer is about to use."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in parts:
            grads = part.get_main_grads_for_grad_norm()
            squares = sum((grad.to(torch.float64).square().sum() for grad in grads), torch.zeros_like(total))
            dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
            total += squares
        norm = float(total.sqrt())
        if not np.isfinite(norm):
            raise TrainingError(f"the gradient's norm is {norm}; the weights were left as they were")
        if 0.0 < self.setup.config.max_grad_norm < norm:
            for part in parts:
                for parameter in part.get_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.setup.config.max_grad_norm / norm)
        return norm

    # --- whole-model tensors shared with the parent ---

    def share(self, kind: str, shared: Shared) -> None:
        """Map the parent's `weights` or `grads`."""
        self._shared[kind] = SharedTensors(shared.shapes, shared.dtype, shared.path)

    def publish(self) -> None:
        """Write the weights to the shared tensors."""
        if self.dp_rank == 0:
            megatron_weights.push(self.held, self._shared["weights"].tensors, tp_rank=self.tp_rank)
        dist.barrier()

    def reload(self) -> None:
        """Take the weights from the shared tensors."""
        self.pull(self._shared["weights"].tensors)

    def pull(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the weights from Hugging Face tensors, into the optimizer's own copies too."""
        megatron_weights.pull(self.held, tensors)
        with cpu_shims.cpu_as_cuda():
            self.optimizer.reload_model_params()

    def spill(self) -> None:
        """Move this run's gradient into the shared tensors, rank by rank, so that the sum has one order."""
        for rank in range(dist.get_world_size()):
            if rank == self.rank:
                megatron_weights.add_grads(self.held, self._shared["grads"].tensors, tp_rank=self.tp_rank)
            dist.barrier()

    def peak_memory(self) -> int:
        """Bytes; see `ranks.peak_memory`."""
        return peak_memory(self.device)

    # --- checkpoints ---

    def save(self, folder: str) -> None:
        """Write this rank's shard into `folder`: its parameters and its share of the optimizer's state."""
        shard = {
            "model": {item.name: item.parameter.data for item in self.held},
            "optimizer": [
                [
                    {
                        "scalars": {key: value for key, value in group.items() if key == "step"},
                        "params": [(p.data, dict(inner.state[p])) for p in group["params"]],
                    }
                    for group in inner.param_groups
                ]
                for inner in self._inner_optimizers()
            ],
        }
        with (Path(folder) / f"rank_{self.rank:05d}.pt").open("wb") as file:
            torch.save(shard, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def load(self, folder: str) -> None:
        """Inverse of `save`, on the same number of ranks in the same arrangement."""
        path = Path(folder) / f"rank_{self.rank:05d}.pt"
        shard = torch.load(path, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for item in self.held:
                item.parameter.copy_(shard["model"][item.name])
            for inner, groups in zip(self._inner_optimizers(), shard["optimizer"], strict=True):
                for group, saved in zip(inner.param_groups, groups, strict=True):
                    group.update(saved["scalars"])
                    for p, (data, state) in zip(group["params"], saved["params"], strict=True):
                        p.data.copy_(data)
                        inner.state[p] = state
        self.zero_grad()
        if "weights" in self._shared:
            self.publish()

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part.optimizer for part in parts if part.optimizer is not None]
