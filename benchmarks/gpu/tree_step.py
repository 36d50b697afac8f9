"""One optimizer step on a GPU: a tree against its flattened paths, on transformers or Megatron-core.

    python -m benchmarks.gpu.tree_step --model 1.7b --json tree.json            # one H100 or H200
    python -m benchmarks.gpu.tree_step --trainer megatron --tp 2 --model 8b     # two
    python -m benchmarks.gpu.tree_step --device cpu --quick                     # smoke test, minutes on a laptop

Per degree of sharing it times forward, backward and update of: the tree; the paths one per micro-batch; the paths packed
into one. `ratio_vs_flat` is against the faster of the last two, `flop_bound` the speed-up that the operation counts
allow. `grad_diff` is the gradient's relative distance, tree to packed paths; `noise` the same between the two flat
layouts, which compute the very same numbers in another order: bfloat16 parity means grad_diff near noise.
Models are random: speed doesn't depend on the values.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre_backend.algorithms import make
from gyre_backend.select.paths import TrainPath
from gyre_backend.trainers.base import TrainerConfig, create
from gyre_backend.trainers.ranks import peak_memory
from gyre_backend.tree.cost import CostModel, flop_bound
from gyre_backend.tree.plan import TreePlan, build_plan, flatten_plan
from gyre_backend.tree.split import piece

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936},
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
}
HEADS = {"tiny": (4, 2, 32), "0.6b": (16, 8, 128), "1.7b": (16, 8, 128), "8b": (32, 8, 128)}


def model_config(size: str) -> Any:
    """A Qwen3 config of the given size: heads, key/value heads and head width as in the released models."""
    from transformers import Qwen3Config

    heads, groups, width = HEADS[size]
    return Qwen3Config(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        max_position_embeddings=65536,
        tie_word_embeddings=size != "8b",
    )


def save_random(size: str, dtype: torch.dtype, folder: Path) -> None:
    """A random model on disk."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(size), dtype=dtype).save_pretrained(folder)


def agent_tree(sharing: float, flat_tokens: int, vocabulary: int) -> TreePlan:
    """Paths of one execution: leaf j leaves the trunk after its j-th turn, as when thinking is dropped from history.

    With J leaves, turns of t and leaves of a tokens: flat = t J(J+1)/2 + J a, unique = J (t + a). J is the smallest
    number of leaves (with a margin) at which the wanted sharing leaves every leaf some tokens of its own.
    """
    leaves = max(2, math.ceil(1 + 2.6 * sharing / (1 - sharing)))
    turn = round(sharing * flat_tokens * 2 / (leaves * (leaves - 1)))
    own = max(2, round((1 - sharing) * flat_tokens / leaves) - turn)
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, vocabulary, leaves * turn)
    paths = []
    for leaf in range(leaves):
        shared = (leaf + 1) * turn if turn else 0
        ids = np.concatenate([[leaf if not turn else 0], trunk[:shared], rng.integers(0, vocabulary, own)])
        trained = np.arange(len(ids)) > shared
        paths.append(
            TrainPath(
                execution="e",
                group="g",
                role="main",
                leaf=str(leaf),
                token_ids=ids.astype(np.int32),
                call=np.where(trained, leaf, -1).astype(np.int32),
                index=np.where(trained, np.arange(len(ids)), -1).astype(np.int32),
                old_logprobs=np.where(trained, -math.log(vocabulary), np.nan).astype(np.float32),
                versions=np.where(trained, 0, -1).astype(np.int32),
            )
        )
    return build_plan(paths, {"e": 1.0})


def one_by_one(flat: TreePlan) -> list[TreePlan]:
    """Each path of a flattened plan as a plan of its own."""
    roots = flat.seg_start[flat.seg_parent < 0].tolist()
    bounds = zip(roots, [*roots[1:], flat.num_tokens], strict=True)
    return [part for part in (piece(flat, a, b) for a, b in bounds) if part.num_edges]


class Runner:
    """A trainer and the clock around it."""

    def __init__(self, trainer: Any, device: str) -> None:
        self.trainer = trainer
        self.device = torch.device(device)

    def settle(self) -> int:
        """Wait for the device; peak bytes since the last call."""
        if hasattr(self.trainer, "peak_memory"):
            return max(self.trainer.peak_memory())
        return peak_memory(self.device)

    def step(self, plans: list[TreePlan]) -> tuple[float, int]:
        """(seconds, peak bytes) of forward and backward of each plan and one update."""
        self.settle()
        started = time.perf_counter()
        for plan in plans:
            self.trainer.forward_backward(plan)
        self.trainer.optimizer_step(1)
        peak = self.settle()
        return time.perf_counter() - started, peak

    def gradient(self, plans: list[TreePlan]) -> torch.Tensor:
        """All gradients as one float32 vector on the CPU, and none left behind."""
        for plan in plans:
            self.trainer.forward_backward(plan)
        parts = [buffer.tensor.detach().float().cpu().flatten() for buffer in self.trainer.named_grads()]
        whole = torch.cat(parts)  # before they are zeroed: parts may be views
        self.trainer.zero_grad()
        return whole


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative, by norm."""
    return float((a - b).norm() / b.norm())


def measure(runner: Runner, plan: TreePlan, model: CostModel, rounds: int) -> dict[str, float]:
    """One row: medians over `rounds`, the layouts in turn within each round."""
    flat = flatten_plan(plan)
    layouts = {"tree": [plan], "paths": one_by_one(flat), "packed": [flat]}
    grads = {name: runner.gradient(plans) for name, plans in layouts.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    peaks = dict.fromkeys(layouts, 0)
    for _ in range(rounds):
        for name, plans in layouts.items():
            took, peak = runner.step(plans)
            seconds[name].append(took)
            peaks[name] = max(peaks[name], peak)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "sharing": plan.sharing,
        "flat_tokens": plan.flat_tokens,
        "unique_tokens": plan.num_tokens,
        "edges": plan.num_edges,
        **{f"{name}_s": value for name, value in median.items()},
        "ratio_vs_flat": min(median["paths"], median["packed"]) / median["tree"],
        "flop_bound": flop_bound(plan, model),
        **{f"{name}_peak_mib": peak / 2**20 for name, peak in peaks.items()},
        "grad_diff": distance(grads["tree"], grads["packed"]),
        "noise": distance(grads["paths"], grads["packed"]),
    }


@contextlib.contextmanager
def trainer_for(args: argparse.Namespace) -> Iterator[tuple[Any, CostModel]]:
    """The trainer on a random model, closed afterwards."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        save_random(args.model, getattr(torch, args.dtype), Path(folder))
        config = TrainerConfig(
            trainer=args.trainer,
            dtype=args.dtype,
            device=args.device,
            attention=args.attention,
            gradient_checkpointing=args.recompute,
            options={"tp": args.tp, "pp": args.pp, "dp": args.dp} if args.trainer == "megatron" else {},
        )
        trainer = create(config, Path(folder), make("grpo"))
        hf = model_config(args.model)
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = CostModel.of_model(AutoModelForCausalLM.from_config(hf))
        try:
            yield trainer, model
        finally:
            getattr(trainer, "close", lambda: None)()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the smoke test's defaults filled in."""
    parser = argparse.ArgumentParser(description="One optimizer step: a tree against its flattened paths.")
    parser.add_argument("--trainer", choices=("hf", "megatron"), default="hf")
    parser.add_argument("--model", choices=tuple(SIZES), default=None, help="default: 1.7b; on a CPU: tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default=None)
    parser.add_argument("--attention", default="flash", help="flash | flex | rows | rect (CPU) | dense")
    parser.add_argument("--sharing", type=float, nargs="+", default=[0.0, 0.5, 0.65, 0.8, 0.88])
    parser.add_argument("--flat-tokens", type=int, default=None, help="default: 65536; on a CPU: 2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="recompute every layer in the backward pass")
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1, help="megatron only")
    parser.add_argument("--quick", action="store_true", help="two degrees of sharing, one round")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    cpu = args.device == "cpu"
    args.model = args.model or ("tiny" if cpu else "1.7b")
    args.dtype = args.dtype or ("float32" if cpu else "bfloat16")
    args.flat_tokens = args.flat_tokens or (2048 if cpu else 65536)
    if args.quick:
        args.sharing, args.rounds = [0.5, 0.8], 1
    if not cpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs the smoke test")
    return args


COLUMNS: dict[str, Callable[[float], str]] = {
    "sharing": lambda v: f"{v:.2f}",
    "unique_tokens": lambda v: f"{v:.0f}",
    "tree_s": lambda v: f"{v:.3f}",
    "paths_s": lambda v: f"{v:.3f}",
    "packed_s": lambda v: f"{v:.3f}",
    "ratio_vs_flat": lambda v: f"{v:.2f}",
    "flop_bound": lambda v: f"{v:.2f}",
    "tree_peak_mib": lambda v: f"{v:.0f}",
    "grad_diff": lambda v: f"{v:.1e}",
    "noise": lambda v: f"{v:.1e}",
}


def main(argv: list[str] | None = None) -> None:
    """Print a table, write `{"meta": ..., "rows": [...]}`."""
    from transformers.utils import logging

    args = parse(argv)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    meta = {**{k: str(v) for k, v in vars(args).items()}, "device_name": device, "torch": torch.__version__}
    rows = []
    print("  ".join(f"{name:>13}" for name in COLUMNS))
    with trainer_for(args) as (trainer, model):
        runner = Runner(trainer, args.device)
        for sharing in args.sharing:
            plan = agent_tree(sharing, args.flat_tokens, SIZES[args.model]["vocab_size"])
            row = measure(runner, plan, model, args.rounds)
            rows.append(row)
            print("  ".join(f"{show(row[name]):>13}" for name, show in COLUMNS.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
