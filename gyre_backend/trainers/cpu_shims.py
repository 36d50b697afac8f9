"""What megatron-core 0.16.1 needs before it runs on a CPU. Nothing here is ever called when CUDA is in use.

megatron-core names CUDA in places where any device would do. Each shim answers one such place:

1. `torch.cuda.current_device()` is the device it allocates on: answer "cpu".
2. The CUDA RNG tracker guards dropout and random initialisation. Gyre refuses dropout and loads every weight,
   so a tracker that does nothing is enough.
3. Activation recompute saves and restores the CUDA RNG state: nothing to save.
4. The optimizer and the schedules write `device="cuda"` or `.cuda()`, compare `tensor.type()` with CUDA type
   names, and turn gradients and router scores into float32, which would cost float64 its digits:
   `cpu_as_cuda()`, a mode to be held around those calls only.
5. Pipeline p2p calls `torch.cuda.synchronize()`: gloo has finished already.
6. Without Transformer Engine the MoE router falls over an undefined name.
7. Importing it compiles a dozen fused functions, all of which are off here, and loading torch's compiler for
   them is most of a rank's start: while megatron-core is imported, `torch.compile` returns what it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from gyre_backend.errors import UnsupportedError

_state: dict[str, bool] = {"installed": False}


class _NoRngTracker:
    """Stands for megatron-core's CudaRNGStatesTracker where nothing random happens."""

    @staticmethod
    def fork(name: str | None = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def get_states() -> dict[str, torch.Tensor]:
        return {}

    @staticmethod
    def set_states(states: dict[str, torch.Tensor]) -> None:
        return None


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """`torch.compile`, as a decorator with or without arguments, that compiles nothing."""
    return (lambda given: given) if function is None else function


def install() -> None:
    """Put the shims in place, once per process.

    Raises UnsupportedError where CUDA is usable: the shims would send CUDA work to the CPU.
    """
    if _state["installed"]:
        return
    if torch.cuda.is_available():
        raise UnsupportedError(
            "device = 'cpu' with the megatron trainer where CUDA is available: use device = 'cuda', or hide the "
            "devices (CUDA_VISIBLE_DEVICES=)"
        )
    compile_, torch.compile = torch.compile, _uncompiled
    try:
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
        from megatron.core.tensor_parallel import random as mcore_random
        from megatron.core.transformer.moe import moe_utils
    finally:
        torch.compile = compile_
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    mcore_random._CUDA_RNG_STATE_TRACKER = _NoRngTracker()
    mcore_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    mcore_random._set_cuda_rng_state = lambda *args, **kwargs: None
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _state["installed"] = True


# float64 has no branch of its own in the optimizer; as "float" it is updated in place, without a float32
# copy.
_TYPE_NAMES: Final = {"torch.DoubleTensor": "torch.cuda.FloatTensor"}


class _CpuAsCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name: str = func(args[0])
            return _TYPE_NAMES.get(name) or name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Shim 4, around the building and stepping of an optimizer and around a pipeline schedule.

    Does nothing unless `install()` was called.
    """
    if not _state["installed"]:
        yield
        return
    with _CpuAsCuda():
        yield
