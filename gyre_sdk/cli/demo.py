"""`gyre demo`: the whole of Gyre in one command, and the proof that its record is right."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import anyio
import tomli_w
from rich.console import Console
from rich.table import Table

from gyre_sdk.cli.assembly import make_run_dir
from gyre_sdk.cli.audit import Audit, against_engine, against_mini
from gyre_sdk.cli.report import reward_table
from gyre_sdk.cli.train import Trained, run_training
from gyre_sdk.errors import ConfigError
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.harness.config import load_run_file
from gyre_sdk.harness.records import wal_paths

ENGINE_LOG = "engine-tokens.jsonl"


def demo(
    *,
    engine: Literal["embedded", "sglang"] = "embedded",
    harness_venv: Path = Path(".venv-mini"),
    sglang_venv: Path = Path(".venv-sglang"),
    steps: int = 2,
    run_dir: Path | None = None,
) -> int:
    """A real model, an unmodified harness, real tasks in sandboxes, two optimizer steps. `make demo` installs what it needs.

    Parameters
    ----------
    engine
        embedded (in the trainer's process), or sglang: a real SGLang server on the CPU.
    harness_venv
        Where mini-swe-agent is installed.
    sglang_venv
        Where SGLang is installed, for --engine sglang.
    steps
        Optimizer steps.
    run_dir
        Where to record; the default is ./runs/TIME-demo.
    """
    console = Console()
    folder = make_run_dir(run_dir, "demo")
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a run already; give another --run-dir")
    config = demo_config(engine, harness_venv, sglang_venv, steps, folder)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    settings = load_run_file(folder / "config.toml")
    console.print(
        f"SmolLM2-135M, mini-swe-agent, {settings.run.group_size} executions of each task, {steps} optimizer steps; "
        f"recorded in {folder}",
        highlight=False,
        soft_wrap=True,
    )
    trained = anyio.run(run_training, settings, folder, folder, None, console)
    return close(console, trained, engine, steps)


def examples_dir() -> Path:
    """The examples: of the checkout, else of the installed package. Raises ConfigError."""
    here = Path(__file__).resolve().parents[2]
    for folder in (here / "examples", here / "gyre_sdk" / "examples"):
        if (folder / "demo.toml").is_file():
            return folder
    raise ConfigError("the demo's examples are not installed; run it from a checkout")


def demo_config(engine: str, harness_venv: Path, sglang_venv: Path, steps: int, folder: Path) -> dict[str, Any]:
    """examples/demo.toml with this machine's paths and the chosen engine."""
    import tomllib

    examples = examples_dir()
    config = tomllib.loads((examples / "demo.toml").read_text())
    config["run"]["tasks"] = str(examples / config["run"]["tasks"])
    config["run"]["harness_install"] = str(harness_venv.resolve())
    config["train"]["steps"] = steps
    if engine == "sglang":
        serve = [sys.executable, "-m", "gyre_backend.engines.sglang_cpu", "serve", str(sglang_venv.resolve())]
        config["engine"] = {"kind": "sglang", "command": [*serve, "{model}", "{port}"]}
    else:
        config.setdefault("engine", {}).setdefault("options", {})["log"] = str(folder / ENGINE_LOG)
    return config


def close(console: Console, trained: Trained, engine: str, steps: int) -> int:
    """The closing tables and checks; the exit code says whether everything held."""
    folder = trained.run_dir
    rows = [json.loads(line) for line in _lines(folder / "metrics.jsonl")]
    console.print(reward_table((one.order.task.name, one.outcome) for one in trained.finished))
    versions = sampled_versions(folder)
    audits = {"mini-swe-agent's own trajectories": against_mini(folder)}
    if engine == "embedded":
        audits["the engine's own log"] = against_engine(folder, folder / ENGINE_LOG)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _facts(trained, rows, versions, audits):
        table.add_row(f"[dim]{name}[/]", value)
    console.print(table)
    problems = [f"{name}: {problem}" for name, audit in audits.items() for problem in audit.problems]
    if len(rows) < steps:
        problems.append(f"{len(rows)} of {steps} optimizer steps were done ({trained.stopped or 'stopped early'})")
    if max(versions, default=0) < len(rows):
        problems.append(f"policy version {len(rows)} was never sampled from")
    for problem in problems[:10]:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    example = next((path.parent.name for path in wal_paths(folder)), "")
    console.print(f"next: gyre graph {example} --why     all executions: gyre graph {folder}", soft_wrap=True)
    return 1 if problems else 0


def _facts(
    trained: Trained, rows: list[dict[str, Any]], versions: Counter[int], audits: dict[str, Audit]
) -> list[tuple[str, str]]:
    rewards = [o.reward for o in (one.outcome for one in trained.finished) if o.valid and o.reward is not None]
    flat, unique = sum(row["flat_tokens"] for row in rows), sum(row["unique_tokens"] for row in rows)
    sampled = ", ".join(f"{count} with version {version}" for version, count in sorted(versions.items()))
    shared = f"{flat} flattened, {unique} unique ({1 - unique / flat:.0%} shared)" if flat else "-"
    return [
        ("executions", f"{len(trained.finished)}, {len(rewards)} valid"),
        (
            "rewards",
            f"{min(rewards):.2f} to {max(rewards):.2f}, mean {sum(rewards) / len(rewards):.3f}" if rewards else "-",
        ),
        ("tokens sampled", sampled or "-"),
        ("tokens trained on", shared),
        ("optimizer steps", str(len(rows))),
        ("loss", ", ".join(f"{row['loss']:.3g}" for row in rows) or "-"),
        ("gradient norm", ", ".join(f"{row['grad_norm']:.3f}" for row in rows) or "-"),
        ("step seconds", ", ".join(f"{row['seconds']:.1f}" for row in rows) or "-"),
        *((f"checked against {name}", str(audit)) for name, audit in audits.items()),
        ("time", f"{trained.seconds:.0f} s"),
        ("run", str(trained.run_dir)),
    ]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []


def sampled_versions(run_dir: Path) -> Counter[int]:
    """Policy version -> tokens sampled with it, over a run."""
    counts: Counter[int] = Counter()
    for log in wal_paths(run_dir):
        for call in load_graph(log).graph.calls.values():
            for span in call.versions:
                counts[span.version] += span.end - span.start
    return counts
