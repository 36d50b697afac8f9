"""One cell's training side: a trainer, what it has accumulated for the open step, and the exchange of weights
and gradients.

No HTTP and no threads here: the worker calls one method at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_backend.errors import CellError, WeightsError
from gyre_backend.trainers.base import MicroStepResult, StepResult, Trainer
from gyre_backend.tree.plan import TreePlan
from gyre_backend.weights import Manifest, Publisher, PullReport, pull, regions_of
from gyre_backend.weights.regions import HostMirror
from gyre_backend.weights.transport import Transport


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A named tensor: one trainer buffer as one micro-step left it."""

    name: str
    tensor: Any


class Replica:
    """Owns a trainer's buffers. `exact_sum` keeps every micro-step's gradient apart until the optimizer
    steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        transport: Transport,
        *,
        exact_sum: bool = False,
        delta: bool = False,
        deadline_s: float = 60.0,
    ) -> None:
        self.trainer = trainer
        self.transport = transport
        self.exact_sum = exact_sum
        self.deadline_s = deadline_s
        self.step = -1
        self.epoch = -1
        self._weights = HostMirror(trainer.named_weights())
        self._weight_publisher = Publisher(transport, delta=delta)
        self._gradient_publisher = Publisher(transport)
        self._micros: dict[int, list[_Buffer]] = {}
        self._done: list[int] = []
        self._frozen = False
        self._held = trainer.version

    @property
    def version(self) -> int:
        """Policy version of the weights held; -1 while they are a mixture (a pull that failed)."""
        return self._held

    # -- the step

    def begin(self, step: int, epoch: int, *, keep: bool = False) -> None:
        """Start with nothing accumulated; with `keep`, go on with what this step has accumulated already (the
        core
        was away in rollout). Raises CellError when the weights are of another version.
        """
        if keep and self.step == step and not self._frozen:
            self.epoch = epoch
            return
        if self._held != step:
            raise CellError(f"step {step} trains version {step}, but this cell holds version {self._held}")
        self._gradient_publisher.withdraw()
        self.trainer.zero_grad()
        self._micros.clear()
        self._done.clear()
        self.step, self.epoch, self._frozen = step, epoch, False

    def micro(self, micro: int, epoch: int, plan: TreePlan) -> MicroStepResult:
        """One forward-backward, added to what is accumulated under `epoch`."""
        if epoch != self.epoch or self._frozen:
            raise CellError(f"epoch {epoch} is over (now {self.epoch}{', frozen' if self._frozen else ''})")
        if micro in self._done:
            raise CellError(f"micro-step {micro} is in this cell's gradient already")
        result = self.trainer.forward_backward(plan)
        self._done.append(micro)
        if self.exact_sum:
            self._micros[micro] = [_Buffer(b.name, b.tensor.detach().clone()) for b in self.trainer.named_grads()]
            self.trainer.zero_grad()
        return result

    def publish_gradients(self, epoch: int, micros: Iterable[int]) -> Manifest:
        """Freeze what is accumulated and let the core read it. `micros` is what the caller believes is in
        it.
        """
        if epoch != self.epoch or sorted(micros) != sorted(self._done):
            raise CellError(
                f"this cell holds micro-steps {sorted(self._done)} of epoch {self.epoch}, not what was asked for"
            )
        self._frozen = True
        mirror = HostMirror(self._gradient_buffers(self._done))
        mirror.from_device()
        return self._gradient_publisher.publish(mirror.regions, self.step)

    def _gradient_buffers(self, micros: Iterable[int]) -> list[_Buffer]:
        """Layout of a gradient on the wire: the trainer's buffers, or with `exact_sum` those of every
        micro-step in order.
        """
        if not self.exact_sum:
            return [_Buffer(b.name, b.tensor) for b in self.trainer.named_grads()]
        return [
            _Buffer(f"{micro:06d}/{buffer.name}", buffer.tensor)
            for micro in sorted(micros)
            for buffer in self._micros[micro]
        ]

    def add_gradients(self, manifest: Manifest, micros: list[int]) -> int:
        """Pull another cell's gradient, check it, and only then add it. Returns bytes. Raises WeightsError:
        nothing was added.
        """
        if manifest.version != self.step:
            raise WeightsError(f"a gradient of step {manifest.version} does not belong to step {self.step}")
        if set(micros) & set(self._done):
            raise CellError(f"micro-steps {sorted(set(micros) & set(self._done))} are counted already")
        staged = self._stage(sorted(micros))
        regions = regions_of(_Buffer(name, tensor) for name, _, _, tensor in staged)
        pull(manifest, regions, self.transport, deadline_s=self.deadline_s)
        for _, micro, buffer, tensor in staged:
            if self.exact_sum:
                self._micros.setdefault(micro, []).append(_Buffer(buffer.name, tensor.to(buffer.tensor.device)))
            else:
                buffer.tensor.add_(tensor.to(buffer.tensor.device))
        self._done += micros
        return manifest.nbytes

    def _stage(self, micros: list[int]) -> list[tuple[str, int, _Buffer, Any]]:
        """Fresh host tensors in the layout that `_gradient_buffers` of the other cell has: (name there,
        micro-step
        or -1, buffer here, tensor).
        """
        import torch

        return [
            (
                buffer.name if micro < 0 else f"{micro:06d}/{buffer.name}",
                micro,
                _Buffer(buffer.name, buffer.tensor),
                torch.zeros(buffer.tensor.shape, dtype=buffer.tensor.dtype),
            )
            for micro in (micros if self.exact_sum else [-1])
            for buffer in self.trainer.named_grads()
        ]

    def optimizer_step(self, num_executions: int, micros: Iterable[int]) -> StepResult:
        """Sum (with `exact_sum`: micro-step by micro-step, in order), then the trainer's own step. Readers
        are shut
        out first. Raises CellError unless exactly `micros` are in the gradient, each once.
        """
        if sorted(micros) != sorted(self._done):
            raise CellError(f"the core's gradient holds micro-steps {sorted(self._done)}, not {sorted(micros)}")
        self._weight_publisher.withdraw()
        if self.exact_sum:
            self.trainer.zero_grad()
            for micro in sorted(self._micros):
                for total, part in zip(self.trainer.named_grads(), self._micros[micro], strict=True):
                    total.tensor.add_(part.tensor)
        result = self.trainer.optimizer_step(num_executions)
        self._held = self.trainer.version
        self._micros.clear()
        self._done.clear()
        self.epoch = -1
        return result

    # -- weights

    def publish_weights(self) -> Manifest:
        """Let others read the weights held. The same manifest again while nothing has changed."""
        standing = self._weight_publisher.manifest
        if standing is not None and standing.version == self._held:
            return standing
        if self._held < 0:
            raise CellError("this cell's weights are not whole; nothing can be published from it")
        self._weights.from_device()
        return self._weight_publisher.publish(self._weights.regions, self._held)

    def pull_weights(self, manifest: Manifest) -> PullReport:
        """Become `manifest.version`. A failure leaves the version unknown (-1) until a pull succeeds."""
        self._weight_publisher.withdraw()
        held, self._held = self._held, -1
        report = pull(manifest, self._weights.regions, self.transport, held_version=held, deadline_s=self.deadline_s)
        self._weights.to_device()
        self.trainer.load_weights(manifest.version)
        self._held = manifest.version
        return report

    # -- files

    def save(self, path: Path) -> str:
        """A resumable checkpoint; returns the digest of the weights in it."""
        self.trainer.save(path)
        return self.publish_weights().digest

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, with nothing accumulated."""
        self._weight_publisher.withdraw()
        self._gradient_publisher.withdraw()
        self.trainer.load(path)
        self._held = self.trainer.version
        self._micros.clear()
        self._done.clear()
        self.epoch = -1

    def close(self) -> None:
        """Withdraw everything that others may read."""
        self.transport.close()
