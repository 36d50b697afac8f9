"""One optimizer step on a prefix tree against the same step on flattened paths. Same edges, same loss, same
update.

    python -m benchmarks.tree_step [--quick] [--threads 1 2] [--rounds N] [--json FILE]

Every row runs in a process of its own. Times are process CPU time (the sum over threads) and medians over
rounds, in which the methods take turns; `wall_*` are wall times. Two rounds before them warm up and measure memory. All
methods compute logits at loss edges only, so that none is made to look slow.

flat paths     every path a micro-batch of its own
flat packed    the paths of a group side by side in one micro-batch
one level      only the group's (or only the execution's) common prefix is shared, whichever costs fewer FLOPs
dense mask     the tree with one [U, U] mask
tree           the tree as Gyre trains it
bounded        the tree, one segment at a time

ratio_vs_flat          the faster of the two flat layouts / tree
flop_bound             what the operation counts allow for that ratio
ratio_vs_one_level, ratio_vs_dense_mask, ratio_vs_bounded      theirs / tree
peak_mib               resident memory above the loaded model and optimizer, in the tree's step (also of the
others) grad_rel_err           worst parameter's relative gradient error to flat paths, the first group in
float64

`j_max` rows: one recorded group of long executions, selected with J_max = 1, 5, none: the seconds of
forward-backward, flat and tree.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tree_shapes import Shape, recorded_group, shape_for
from gyre_backend.select import SelectionConfig, TrainPath, select_group
from gyre_backend.tree.cost import CostModel, cost, flat_cost
from gyre_backend.tree.plan import TreePlan, build_plan, flatten_plan

SHARINGS = (0.0, 0.5, 0.65, 0.8, 0.88)
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 684,
    "vocab_size": 4096,
    "head_dim": 32,
}
_NAMES = {"one_level": "one_level", "dense": "dense_mask", "bounded": "bounded"}
METHODS = tuple(_NAMES)
_ONCE = ("dense", "bounded")
"""Timed in the first round only: they are many times slower, or not a rival."""


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the tokens, one round, three sharings, one thread"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sharings", type=float, nargs="+", default=list(SHARINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16800, help="flattened tokens per step")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), help="leave slow ones out, tree and flat_* never"
    )
    parser.add_argument("--no-j-max", action="store_true", help="leave the J_max rows out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.threads, args.sharings, args.rounds, args.tokens = [1], [0.0, 0.65, 0.88], 1, 6000
    rows = []
    for threads in args.threads:
        for sharing in args.sharings:
            rows.append(in_process(sharing_row, sharing, threads, args.rounds, args.tokens, args.methods))
            print_row(rows[-1])
    if not args.no_j_max:
        for j_max in (1, 5, None):
            rows.append(in_process(j_max_row, j_max, 1, args.rounds))
            print_row(rows[-1])
    if args.json:
        meta = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "model": MODEL}
        meta |= {"rounds": args.rounds, "tokens": args.tokens, "load": os.getloadavg()[0], "quick": args.quick}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


def print_row(row: dict[str, Any]) -> None:
    """One line per row."""
    print(
        "  ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    )


def in_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run in a new process: fresh memory, its own thread count."""
    threads = args[1]
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    with multiprocessing.get_context("spawn").Pool(1, _die_with_parent) as pool:
        return pool.apply(function, args)


def _die_with_parent() -> None:
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Measured(NamedTuple):
    """What one method took, round by round."""

    cpu: list[float]
    """CPU seconds of the process, all threads"""
    wall: list[float]
    peak: float
    """MiB above the loaded model and optimizer"""


def ratios(measured: dict[str, Measured], others: Sequence[str], to: str = "tree", of: str = "cpu") -> list[float]:
    """The fastest of `others` over `to`, per round: both sides of a round saw the same machine."""
    columns = [getattr(measured[name], of) for name in others]
    return [min(row) / base for *row, base in zip(*columns, getattr(measured[to], of), strict=False)]  # see _ONCE


# --- rows (each runs in its own process) ---


def sharing_row(sharing: float, threads: int, rounds: int, tokens: int, also: Sequence[str]) -> dict[str, Any]:
    """All methods on one recorded group of a shape of this sharing."""
    groups = [_selected(shape_for(sharing, tokens), 0, None)]
    trainer = _trainer(threads, "float32")
    model = CostModel.of_model(trainer.model)
    trees = [build_plan(*group) for group in groups]
    methods: dict[str, tuple[list[TreePlan], str, bool]] = {
        "tree": (trees, "auto", False),
        "flat_paths": ([flatten_plan(plan) for group in groups for plan in _single_paths(group)], "auto", False),
        "flat_packed": ([flatten_plan(plan) for plan in trees], "auto", False),
        "one_level": ([_one_level(group, model) for group in groups], "auto", False),
        "dense": (trees, "dense", False),
        "bounded": (trees, "auto", True),
    }
    methods = {name: method for name, method in methods.items() if name in also or name not in METHODS}
    measured = _measure(trainer, methods, rounds)
    flat = ratios(measured, ("flat_paths", "flat_packed"))
    flops = {"tree": sum(cost(p, model) for p in trees), "flat": sum(flat_cost(p, model) for p in trees)}
    bound = flops["flat"] / flops["tree"]
    others = [name for name in METHODS if name in measured]
    return {
        "sharing": sharing,
        "threads": threads,
        "flat_tokens": sum(plan.flat_tokens for plan in trees),
        "unique_tokens": sum(plan.num_tokens for plan in trees),
        "achieved_sharing": 1 - sum(p.num_tokens for p in trees) / sum(p.flat_tokens for p in trees),
        "ratio_vs_flat": statistics.median(flat),
        "ratio_vs_flat_min": min(flat),
        "ratio_vs_flat_max": max(flat),
        "flop_bound": bound,
        "ratio_of_bound": statistics.median(flat) / bound,
        **{f"ratio_vs_{_NAMES[name]}": statistics.median(ratios(measured, (name,))) for name in others},
        "wall_ratio_vs_flat": statistics.median(ratios(measured, ("flat_paths", "flat_packed"), of="wall")),
        "peak_mib": measured["tree"].peak,
        **{f"peak_mib_{name}": found.peak for name, found in measured.items() if name != "tree"},
        **{f"cpu_s_{name}": statistics.median(found.cpu) for name, found in measured.items()},
        "grad_rel_err": _gradient_error(_selected(shape_for(sharing, tokens // 8), 1, None), threads),
    }


def j_max_row(j_max: int | None, threads: int, rounds: int) -> dict[str, Any]:
    """Forward-backward of one group of 20-turn executions under this J_max."""
    shape = Shape(4, 20, 120, 12, 6, 18)
    group = _selected(shape, 0, j_max)
    trainer = _trainer(threads, "float32")
    tree = build_plan(*group)
    flat = [flatten_plan(plan) for plan in _single_paths(group)]
    measured = _measure(trainer, {"tree": ([tree], "auto", False), "flat_paths": (flat, "auto", False)}, rounds)
    cpu = {name: statistics.median(found.cpu) for name, found in measured.items()}
    return {
        "j_max": "none" if j_max is None else j_max,
        "threads": threads,
        "paths": len(group[0]),
        "trained_tokens": tree.num_edges,
        "flat_tokens": tree.flat_tokens,
        "unique_tokens": tree.num_tokens,
        "cpu_s_tree": cpu["tree"],
        "cpu_s_flat": cpu["flat_paths"],
        "ratio_vs_flat": statistics.median(ratios(measured, ("flat_paths",))),
        "tree_ms_per_trained_token": 1e3 * cpu["tree"] / tree.num_edges,
        "flat_ms_per_trained_token": 1e3 * cpu["flat_paths"] / tree.num_edges,
    }


def _selected(shape: Shape, seed: int, j_max: int | None) -> tuple[Sequence[TrainPath], dict[str, float]]:
    graphs = recorded_group(shape, seed=seed, vocabulary=MODEL["vocab_size"], group=f"g{seed}.")
    found = select_group(graphs, SelectionConfig(j_max=j_max, equal_rewards="keep"))
    # A group of one has advantage 0, and a gradient of 0 would make every layout look exact.
    return found.paths, {execution: value or 1.0 for execution, value in found.advantages.items()}


def _single_paths(group: tuple[Sequence[TrainPath], dict[str, float]]) -> list[TreePlan]:
    """A plan per path, with the weights that its execution gives its edges."""
    paths, advantages = group
    counts: dict[str, int] = {}
    for path in paths:
        counts[path.execution] = counts.get(path.execution, 0) + path.trained
    return [build_plan([path], advantages, weighting=str(counts[path.execution])) for path in paths]


def _one_level(group: tuple[Sequence[TrainPath], dict[str, float]], model: CostModel) -> TreePlan:
    """The cheaper of sharing each group's common prefix and sharing each execution's."""
    paths, advantages = group
    layouts = []
    for key in ("group", "execution"):
        prefix: dict[str, np.ndarray] = {}
        for path in paths:
            name, ids = getattr(path, key), path.token_ids
            held = prefix.get(name, ids)
            n = min(len(held), len(ids))
            differs = np.flatnonzero(held[:n] != ids[:n])
            prefix[name] = held[: differs[0] if len(differs) else n]
        caps = [len(prefix[getattr(path, key)]) for path in paths]
        layouts.append(build_plan(paths, advantages, max_shared=caps))
    return min(layouts, key=lambda plan: cost(plan, model))


def _trainer(threads: int, dtype: str) -> Any:
    import torch
    import transformers

    from gyre_backend.algorithms import make
    from gyre_backend.trainers.base import TrainerConfig
    from gyre_backend.trainers.hf import HFTrainer

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3Config(**MODEL, tie_word_embeddings=False, max_position_embeddings=32768)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
        return HFTrainer(Path(folder), TrainerConfig(dtype=dtype, lr=1e-6), make("grpo"))


def _measure(trainer: Any, methods: dict[str, tuple[list[TreePlan], str, bool]], rounds: int) -> dict[str, Measured]:
    """One optimizer step by each method, in turns.

    Two rounds are not timed: in one, for memory, the heap is given back before each method; the other warms it up, as it is
    in a training process after its first step.
    """
    from dataclasses import replace

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    peaks: dict[str, float] = {}
    warm = methods["flat_paths"][0][0]
    trainer.forward_backward(warm)
    trainer.optimizer_step(1)
    for number in range(-2, rounds):
        for name, (plans, attention, bounded) in methods.items():
            if name in _ONCE and number not in (-2, 0):
                continue
            trainer.model.gyre_attention = attention
            trainer.config = replace(trainer.config, bounded_memory=bounded)
            base = _reset_peak() if number == -2 else 0.0
            cpu, wall = time.process_time(), time.perf_counter()
            for plan in plans:
                trainer.forward_backward(plan)
            trainer.optimizer_step(4)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if number == -2:
                peaks[name] = _memory("VmHWM") - base
            elif number >= 0:
                times[name].append((cpu, wall))
    return {name: Measured(*map(list, zip(*times[name], strict=True)), peaks[name]) for name in methods}


def _reset_peak() -> float:
    """Give free memory back, forget the peak; resident MiB now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not tell {field}")


def _gradient_error(group: tuple[Sequence[TrainPath], dict[str, float]], threads: int) -> float:
    trainer = _trainer(threads, "float64")
    grads = []
    for plans in ([build_plan(*group)], _single_paths(group)):
        trainer.zero_grad()
        for plan in plans:
            trainer.forward_backward(plan)
        grads.append([buffer.tensor.clone() for buffer in trainer.named_grads()])
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(*grads))


if __name__ == "__main__":
    main()
