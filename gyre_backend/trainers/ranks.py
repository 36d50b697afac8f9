"""Starts the ranks of a trainer as child processes, drives all of them from one object, ends them all.

Each rank runs `python -m gyre_backend.trainers.rank_process`. A rank leaves when its stdin ends, so none
outlives its parent, however that died. Ranks meet through a file (no port to collide on) and talk over gloo
or NCCL; the parent talks to each over its own socket pair. Whole-model tensors that both sides use live in
anonymous shared memory.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from gyre_backend.errors import TrainingError

_ALIGN: Final = 64


class SharedTensors:
    """Named contiguous tensors in one anonymous memory file; freed with the last process that maps it."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, path: str | None = None) -> None:
        """Without `path`, makes a new zeroed memory file; with the `path` of another, maps that one."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.dtype = dtype
        size = dtype.itemsize
        offsets, total = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = total
            total += -(-_numel(shape) * size // _ALIGN) * _ALIGN // size
        self._fd = -1
        if path is None:
            self._fd = os.memfd_create("gyre-ranks", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, total * size)
            path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.path = path
        """Opens the same memory in a process of the same user, while this one holds it."""
        flat = torch.from_file(path, shared=True, size=total, dtype=dtype)
        self.tensors = {
            name: flat[offsets[name] : offsets[name] + _numel(shape)].view(shape) for name, shape in self.shapes.items()
        }

    def close(self) -> None:
        """Give the file handle back; the tensors stay valid as long as they are referenced."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class Shared:
    """How a rank maps a SharedTensors of its parent's."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    path: str


@dataclass(frozen=True, slots=True)
class Edges:
    """What a plan's edges came to: float64[E] each."""

    logp: np.ndarray
    entropy: np.ndarray
    ref_logp: np.ndarray | None = None
    """the reference policy's, when there is one"""


def peak_memory(device: torch.device) -> int:
    """Bytes: on CUDA the most allocated since the last call, on a CPU the process's largest resident size so far.

    Waits for the device, so that a clock read after it is right.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = int(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def edges_of(logp: torch.Tensor, entropy: torch.Tensor, ref_logp: torch.Tensor | None) -> Edges:
    """Per-edge tensors as they travel to the parent."""
    columns = [None if t is None else t.detach().to("cpu", torch.float64).numpy() for t in (logp, entropy, ref_logp)]
    return Edges(*columns)  # type: ignore[arg-type]


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def tell(link: multiprocessing.connection.Connection, message: Any) -> None:
    """Send by plain pickle: the connection's own would hand tensors over as open files, which needs a shared key."""
    link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def hear(link: multiprocessing.connection.Connection) -> Any:
    """Inverse of `tell`, from a process that we started or that started us. EOFError when it is gone."""
    return pickle.loads(link.recv_bytes())


class Ranks:
    """The running ranks. Not thread-safe: one call at a time."""

    def __init__(self, world: int, replica: str, setup: Any, *, start_timeout: float = 600.0) -> None:
        """Start `world` ranks; each becomes `replica` ("module:class") built from `setup` (picklable).

        Raises TrainingError with the rank's own message if one can't start.
        """
        self.world = world
        self._folder = Path(tempfile.mkdtemp(prefix="gyre-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[multiprocessing.connection.Connection] = []
        try:
            for rank in range(world):
                self._start(rank)
            self.call("build", replica, setup, timeout=start_timeout)
        except BaseException:  # cleans up and raises again
            self.close(grace=0.0)
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "GYRE_RENDEZVOUS": str(self._folder / "rendezvous"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        argv = [sys.executable, "-m", "gyre_backend.trainers.rank_process", str(theirs.fileno())]
        with theirs:  # stdout goes to stderr: a cell's own stdout is for its parent alone
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=2, pass_fds=(theirs.fileno(),), env=environment, bufsize=0
            )
        self._processes.append(process)
        self._links.append(multiprocessing.connection.Connection(ours.detach()))

    def call(self, op: str, *args: Any, each: Sequence[Any] | None = None, timeout: float | None = None) -> list[Any]:
        """Run `op` on every rank; answers by rank. `each[rank]`, if given, is a last argument.

        Raises TrainingError if any rank fails or dies; the others, perhaps waiting for it, are then ended
        too.
        """
        if not self._links:
            raise TrainingError("the ranks have been closed")
        try:
            for rank, link in enumerate(self._links):
                tell(link, (op, (*args, each[rank]) if each is not None else args))
            return self._answers(op, timeout)
        except BaseException:  # cleans up and raises again
            self.close(grace=0.0)
            raise

    def _answers(self, op: str, timeout: float | None) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(answers) < self.world:
            waiting = [link for rank, link in enumerate(self._links) if rank not in answers]
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = multiprocessing.connection.wait(waiting, left)
            if not ready:
                late = sorted(set(range(self.world)) - set(answers))
                raise TrainingError(f"ranks {late} did not finish {op!r} within {timeout:g} s")
            for link in ready:
                rank = self._links.index(link)  # type: ignore[arg-type]
                answers[rank] = self._answer(rank, op)
        return [answers[rank] for rank in range(self.world)]

    def _answer(self, rank: int, op: str) -> Any:
        try:
            failed, value = hear(self._links[rank])
        except (EOFError, ConnectionError):
            code = self._processes[rank].wait()
            raise TrainingError(f"rank {rank} died during {op!r} (exit status {code})") from None
        if failed:
            if isinstance(value, Exception):
                raise value
            raise TrainingError(f"rank {rank} failed during {op!r}: {value}")
        return value

    def close(self, *, grace: float = 5.0) -> None:
        """End every rank: by asking, after `grace` seconds by killing. Safe to call twice."""
        for link in self._links:
            link.close()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + grace
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._links, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)
