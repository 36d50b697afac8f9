"""`gyre train CONFIG.toml`: this process runs the harnesses; a backend child (or one elsewhere) trains."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Console
from rich.table import Table

from gyre_sdk.cli.assembly import RunInfo, make_agent, make_run_dir, resolve_model
from gyre_sdk.cli.children import service
from gyre_sdk.cli.gateway import open_gateway
from gyre_sdk.cli.live import RunView
from gyre_sdk.cli.run_folder import held
from gyre_sdk.environments import load_tasks
from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.backend_client import BackendClient, Order
from gyre_sdk.harness.config import RunFile, load_run_file
from gyre_sdk.harness.pool import Finished, Pool
from gyre_sdk.harness.runner import ExecutionOrder, Runner, RunnerSettings

if TYPE_CHECKING:
    from gyre_sdk.environments import Task
    from gyre_sdk.harness.agents import Agent

SERVICE_START_S = 300.0
STATUS_EVERY_S = 1.0


@dataclass
class Trained:
    """What a training run did on this side of the border."""

    run_dir: Path
    finished: list[Finished] = field(default_factory=list)
    stopped: str = ""
    """The service's reason for stopping."""
    status: dict[str, Any] = field(default_factory=dict)
    """Its last status."""
    seconds: float = 0.0


def train(
    config: Path,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    backend_url: str | None = None,
) -> int:
    """Train a model on tasks, as a TOML file says.

    Parameters
    ----------
    config
        TOML file: [run] and [sampling] for this side, the backend's tables for the other. docs/configuration.md lists them.
    run_dir
        Where to record; the default is ./runs/TIME-train.
    resume
        Go on with the run in --run-dir, from its last checkpoint and its ledger.
    backend_url
        A running `gyre serve`; without it one is started for this run. Its token comes from $GYRE_ADMIN_TOKEN.
    """
    console = Console()
    settings = load_run_file(config)
    if resume and run_dir is None:
        raise ConfigError("--resume needs --run-dir: the run to go on with (`gyre runs ls` lists them)")
    if not backend_url:
        _refuse_what_the_backend_refuses(config)
    folder = make_run_dir(run_dir, "train")
    with held(folder):
        if (folder / "config.toml").exists() and not resume:
            raise ConfigError(f"{folder} holds a run already; give another --run-dir, or --resume to go on")
        if not resume:
            shutil.copyfile(config, folder / "config.toml")
        try:
            trained = anyio.run(run_training, settings, config.resolve().parent, folder, backend_url, console)
        except KeyboardInterrupt:
            console.print(f"stopped; gyre train {config} --run-dir {folder} --resume goes on", soft_wrap=True)
            raise
    print_training(console, trained)
    return 0


def _refuse_what_the_backend_refuses(config: Path) -> None:
    """Before anything is recorded, and by the name of the user's own file; the backend itself reads the run's copy."""
    check = [sys.executable, "-m", "gyre_backend.config", str(config)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ConfigError((done.stderr.strip().splitlines() or ["the backend can't be imported"])[-1])


async def run_training(
    settings: RunFile, base: Path, folder: Path, backend_url: str | None, console: Console
) -> Trained:
    """Start (or reach) the backend, then follow its orders until it says stop."""
    tasks = load_tasks((base / settings.run.tasks).resolve(), only=list(settings.run.only) or None)
    install = settings.run.harness_install
    agent = make_agent(_harness(settings.run.harness, base), str(base / install) if install else None)
    started = time.monotonic()
    async with _backend(folder, backend_url, console) as (url, token):
        client = BackendClient(url, token)
        try:
            trained = await _follow(client, url, token, settings, tasks, agent, folder, console)
        finally:
            with anyio.CancelScope(shield=True):
                await client.aclose()
    trained.seconds = time.monotonic() - started
    return trained


def _harness(name: str, base: Path) -> str:
    """A preset's name as it is; the path of a preset file starts at the TOML file's folder, like every other."""
    own = base / name
    return str(own) if name.endswith(".toml") and own.is_file() else name


@asynccontextmanager
async def _backend(folder: Path, url: str | None, console: Console) -> AsyncIterator[tuple[str, str]]:
    if url is not None:
        token = os.environ.get("GYRE_ADMIN_TOKEN", "")
        if not token:
            raise ConfigError("--backend-url needs the backend's token in $GYRE_ADMIN_TOKEN")
        yield url, token
        return
    token = secrets.token_urlsafe(32)
    arguments = ["--config", str(folder / "config.toml"), "--run-dir", str(folder)]
    with console.status("starting the backend: loading the model"):
        child = service(
            "gyre_backend.service",
            arguments,
            log=folder / "backend.log",
            timeout_s=SERVICE_START_S,
            env={**os.environ, "GYRE_ADMIN_TOKEN": token},
        )
        running = await child.__aenter__()
    try:
        yield running.url, token
    finally:
        with anyio.CancelScope(shield=True):
            await child.__aexit__(None, None, None)


async def _follow(
    client: BackendClient,
    url: str,
    token: str,
    settings: RunFile,
    tasks: list[Task],
    agent: Agent,
    folder: Path,
    console: Console,
) -> Trained:
    hello = await client.hello(f"runner-{os.getpid()}", [task.name for task in tasks], settings.run.slots, agent.name)
    model_dir = resolve_model(hello.model, console)
    RunInfo("train", time.time(), hello.model, agent.name, [t.name for t in tasks], settings.run.group_size).write(
        folder
    )
    view = RunView(console, f"training {model_dir.name} with {agent.name}")
    trained = Trained(folder)
    view.header = lambda: status_line(trained.status)
    runner_settings = RunnerSettings(sandbox=settings.run.sandbox, deadline_s=settings.run.deadline_s)
    async with open_gateway(folder, model_dir, hello.router_url, settings.sampling, backend=(url, token)) as (
        gateway,
        port,
    ):
        runner = Runner(gateway, port, agent, runner_settings, folder, view.report)
        pool = Pool(runner, settings.run.slots)
        with view.live():
            await _obey(client, pool, {task.name: task for task in tasks}, trained, view)
    return trained


async def _obey(client: BackendClient, pool: Pool, tasks: dict[str, Task], trained: Trained, view: RunView) -> None:
    async def one(order: ExecutionOrder) -> None:
        trained.finished.append(await pool.run_one(order))

    async def watch() -> None:
        while True:
            await anyio.sleep(STATUS_EVERY_S)
            before = trained.status.get("step")
            trained.status = await client.status()
            if trained.status.get("step") != before and not view.console.is_terminal:
                view.note(status_line(trained.status) or "")

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        async for order in client.orders():
            if order.kind == "group":
                for execution in _executions(order, tasks):
                    group.start_soon(one, execution)
            elif order.kind == "cancel":
                pool.cancel(order.execution)
            elif order.kind == "stop":
                trained.stopped = order.reason
                trained.status = await client.status()
                group.cancel_scope.cancel()


def _executions(order: Order, tasks: dict[str, Task]) -> list[ExecutionOrder]:
    task = tasks.get(order.task)
    if task is None:
        raise ConfigError(f"the backend ordered an unknown task: {order.task!r}")
    meta = {"purpose": order.purpose}
    return [ExecutionOrder(execution, order.group, task, meta) for execution in order.executions]


def status_line(status: dict[str, Any]) -> str | None:
    """The service's state as one line."""
    if not status:
        return None
    last = status.get("last") or {}
    parts = [f"step {status.get('step', 0)}", f"policy version {status.get('policy_version', 0)}"]
    parts += [f"{name} {last[name]:.4g}" for name in ("loss", "reward", "grad_norm", "sharing") if name in last]
    cells = status.get("cells") or []
    if len(cells) > 1:  # R rolls out, T trains; c: on its way, or down
        letters = {"rollout": "R", "training": "T"}
        parts.append("cells " + "".join(letters.get(cell["role"], "c") for cell in cells))
    phase = status.get("phase")
    return "   ".join([*parts, *([str(phase)] if phase else [])])


def print_training(console: Console, trained: Trained) -> None:
    """The closing table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in training_facts(trained):
        table.add_row(f"[dim]{name}[/]", value)
    console.print(table)


def training_facts(trained: Trained) -> list[tuple[str, str]]:
    """Name and value of what a training run did."""
    rewards = [o.reward for o in (f.outcome for f in trained.finished) if o.valid and o.reward is not None]
    mean = f"mean {sum(rewards) / len(rewards):.3f}, {min(rewards):.2f} to {max(rewards):.2f}" if rewards else "-"
    return [
        ("stopped", trained.stopped or "-"),
        ("executions", f"{len(trained.finished)}, {len(rewards)} valid"),
        ("rewards", mean),
        ("optimizer steps", str(trained.status.get("step", 0))),
        ("policy version", str(trained.status.get("policy_version", 0))),
        ("seconds", f"{trained.seconds:.0f}"),
        ("run", str(trained.run_dir)),
    ]
