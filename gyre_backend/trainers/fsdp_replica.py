"""What one rank of an FSDP run holds: its shard of a transformers model (`fully_shard`) and of AdamW's state.

Every rank computes plans of its own; gradients are summed, not averaged, over ranks. Each decoder layer is
one unit of sharding; what is outside the layers (embedding, last norm, head) is another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gyre_backend.algorithms.batch import Algorithm, EdgeBatch
from gyre_backend.errors import TrainingError
from gyre_backend.select.paths import TrainPath
from gyre_backend.trainers.base import TrainerConfig
from gyre_backend.trainers.hf_model import enable_checkpointing, head_of, hidden_states, load_model, precision
from gyre_backend.trainers.memory import keep_freed_memory
from gyre_backend.trainers.ranks import Edges, Shared, SharedTensors, edges_of, peak_memory
from gyre_backend.tree.loss import edge_logprobs
from gyre_backend.tree.plan import TreePlan, build_plan, plan_from_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a rank is built from."""

    model_dir: str
    config: TrainerConfig
    algorithm: Algorithm


class _EdgeModel(torch.nn.Module):
    """The model up to log p of the edges: one module, so that sharding gathers weights once per forward."""

    def __init__(self, model: Any, chunk: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.temperature = temperature

    def forward(self, plan: TreePlan) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states(self.model, plan)
        return edge_logprobs(hidden, head_of(self.model, self.temperature), plan, chunk=self.chunk)


def idle_plan() -> TreePlan:
    """Two tokens and an edge: what a rank without work runs, at weight 0, as collectives wait for all ranks."""
    call = np.array([-1, 0], np.int32)
    path = TrainPath(
        execution="idle",
        group="idle",
        role="main",
        leaf="0",
        token_ids=np.zeros(2, np.int32),
        call=call,
        index=call,
        old_logprobs=np.array([np.nan, 0.0], np.float32),
        versions=call,
    )
    return build_plan([path], {"idle": 0.0})


class Replica:
    """This rank's state. See `rank_process` for who calls it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu")
        config = setup.config
        if config.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            keep_freed_memory()
        dist.init_process_group(
            "nccl" if config.device == "cuda" else "gloo",
            init_method=f"file://{os.environ['GYRE_RENDEZVOUS']}",
            rank=self.rank,
            world_size=self.world,
        )
        self._shared: dict[str, SharedTensors] = {}
        model = load_model(
            Path(setup.model_dir), dtype=config.dtype, device=str(self.device), attention=config.attention
        )
        if config.gradient_checkpointing:
            enable_checkpointing(model)
        self.model = model
        self.edges = _EdgeModel(model, config.logits_chunk, config.temperature)
        self._shard(self.edges)
        self.reference: _EdgeModel | None = None
        if config.ref_model:
            where = {"dtype": config.dtype, "device": str(self.device), "attention": config.attention}
            frozen = load_model(Path(config.ref_model), **where).requires_grad_(False)
            self.reference = _EdgeModel(frozen, config.logits_chunk, config.temperature)
            self._shard(self.reference)
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for _, p in self.named if p.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [p for _, p in self.named if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
        )
        self.zero_grad()

    def _shard(self, whole: _EdgeModel) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        kinds = set(whole.model._no_split_modules or ())
        for module in whole.model.modules():
            if type(module).__name__ in kinds:
                fully_shard(module, mesh=mesh)
        fully_shard(whole, mesh=mesh, reshard_after_forward=False)
        for module in whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # sums stay sums

    # --- a micro-step ---

    def forward_backward(self, version: int, plans: Sequence[bytes]) -> list[Edges]:
        """Add the gradients of this rank's plans to the sum over ranks."""
        return self._run([plan_from_bytes(plan) for plan in plans], version, backward=True)

    def logprobs(self, plans: Sequence[bytes]) -> list[Edges]:
        """As `forward_backward`, without gradients."""
        with torch.no_grad():
            return self._run([plan_from_bytes(plan) for plan in plans], 0, backward=False)

    def _run(self, plans: list[TreePlan], version: int, *, backward: bool) -> list[Edges]:
        rounds = torch.tensor(len(plans), device=self.device)
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
        results = []
        for turn in range(int(rounds)):
            idle = turn >= len(plans)
            with precision(self.model, self.setup.config.autocast):
                edges = self._one(idle_plan() if idle else plans[turn], version, backward=backward, idle=idle)
            if not idle:
                results.append(edges)
        return results

    def _one(self, plan: TreePlan, version: int, *, backward: bool, idle: bool) -> Edges:
        ref_logp = None
        if self.reference is not None and backward:
            with torch.no_grad():
                ref_logp = self.reference(plan)[0]
        logp, entropy = self.edges(plan)
        if backward:
            batch = EdgeBatch.of(plan, logp, version=version, entropy=entropy, ref_logp=ref_logp)
            loss = logp.sum() * 0.0 if idle else self.setup.algorithm(batch).loss
            if not torch.isfinite(loss):
                raise TrainingError(f"the loss of a micro-step of {plan.num_edges} edges is {float(loss)}")
            loss.backward()
        return edges_of(logp, entropy, ref_logp)

    # --- a step ---

    def zero_grad(self) -> None:
        """Set the gradients, and the shared ones if this is the first rank, to zero."""
        for _, p in self.named:
            p.grad = None
        if self.rank == 0 and "grads" in self._shared:
            for tensor in self._shared["grads"].tensors.values():
                tensor.zero_()
        dist.barrier()

    def step(self, num_executions: int, lr: float) -> float:
        """Divide by N, clip, update, zero. Returns the norm before clipping."""
        with torch.no_grad():
            if "grads" in self._shared:
                for name, p in self.named:
                    self._grad(p).add_(self._mine(self._shared["grads"].tensors[name]))
            grads = [self._grad(p) for _, p in self.named]
            for grad in grads:
                grad.mul_(1.0 / num_executions)
            squares = torch.stack([grad.to(torch.float64).square().sum() for grad in grads]).sum()
            dist.all_reduce(squares)
            norm = float(squares.sqrt())
            if not np.isfinite(norm):
                raise TrainingError(f"the gradient norm is {norm}; the step was not taken")
            if 0.0 < self.setup.config.max_grad_norm < norm:
                for grad in grads:
                    grad.mul_(self.setup.config.max_grad_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.zero_grad()
        if "weights" in self._shared:
            self.publish()
        return norm

    def _grad(self, p: Any) -> torch.Tensor:
        """This rank's rows of the gradient; zeros if there is none yet."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        local: torch.Tensor = p.grad.to_local()
        return local

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor: FSDP2 splits the first axis as torch.chunk does."""
        each = -(-whole.shape[0] // self.world)
        first = min(self.rank * each, whole.shape[0])
        return whole[first : first + each]

    # --- whole-model tensors shared with the parent ---

    def share(self, kind: str, shared: Shared) -> None:
        """Map the parent's `weights` or `grads`."""
        self._shared[kind] = SharedTensors(shared.shapes, shared.dtype, shared.path)

    def publish(self) -> None:
        """Write the weights to the shared tensors."""
        for name, p in self.named:
            self._mine(self._shared["weights"].tensors[name]).copy_(p.to_local().detach())
        dist.barrier()

    def reload(self) -> None:
        """Take the weights from the shared tensors."""
        for name, p in self.named:
            p.to_local().detach().copy_(self._mine(self._shared["weights"].tensors[name]))
        dist.barrier()

    def spill(self) -> None:
        """Move the gradient into the shared tensors."""
        with torch.no_grad():
            for name, p in self.named:
                if p.grad is not None:
                    self._mine(self._shared["grads"].tensors[name]).add_(self._grad(p))
                    p.grad = None
        dist.barrier()

    def peak_memory(self) -> int:
        """Bytes; see `ranks.peak_memory`."""
        return peak_memory(self.device)

    # --- checkpoints ---

    def save(self, folder: str) -> None:
        """Write this rank's shard: its rows of the weights and of AdamW's moments."""
        shard = [(p.to_local().detach(), self._state(p)) for _, p in self.named]
        with (Path(folder) / f"rank_{self.rank:05d}.pt").open("wb") as file:
            torch.save(shard, file)
        dist.barrier()

    def _state(self, p: Any) -> Mapping[str, torch.Tensor]:
        return {
            key: value.to_local() if hasattr(value, "to_local") else value
            for key, value in self.optimizer.state[p].items()
        }

    def load(self, folder: str) -> None:
        """Inverse of `save`, on the same number of ranks."""
        from torch.distributed.tensor import DTensor

        shard = torch.load(Path(folder) / f"rank_{self.rank:05d}.pt", map_location=self.device, weights_only=True)
        for (_, p), (local, state) in zip(self.named, shard, strict=True):
            p.to_local().detach().copy_(local)
            self.optimizer.state[p] = {
                key: value
                if key == "step"
                else DTensor.from_local(
                    value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
                for key, value in state.items()
            }
        self.zero_grad()
        if "weights" in self._shared:
            self.publish()
