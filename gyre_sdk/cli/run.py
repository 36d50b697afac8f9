"""`gyre run`: harness x tasks x group size, recorded and graded, without training."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
from cyclopts import Parameter
from rich.console import Console

from gyre_sdk.cli.assembly import RunInfo, embedded_engine, make_agent, make_run_dir, resolve_model
from gyre_sdk.cli.gateway import open_gateway
from gyre_sdk.cli.live import RunView
from gyre_sdk.cli.report import print_report
from gyre_sdk.cli.run_folder import checked_deadline, held, refuse_another_run, sampling_of
from gyre_sdk.environments import load_tasks
from gyre_sdk.environments.sandbox.choose import resolve
from gyre_sdk.errors import ConfigError
from gyre_sdk.harness.config import SamplingConfig
from gyre_sdk.harness.pool import Finished, PlannedExecution, Pool, load_or_make_plan, plan_groups
from gyre_sdk.harness.recording import ModelFreeRecording, Recording
from gyre_sdk.harness.records import sealed_outcomes
from gyre_sdk.harness.runner import ExecutionOrder, Runner, RunnerSettings

if TYPE_CHECKING:
    from gyre_sdk.environments import Task
    from gyre_sdk.harness.agents import Agent


def run(
    *,
    tasks: Annotated[Path, Parameter(alias="-t")],
    harness: Annotated[str, Parameter(alias="-a")] = "mini-swe-agent",
    group_size: Annotated[int, Parameter(alias="-g")] = 1,
    jobs: Annotated[int, Parameter(alias="-j")] = 2,
    only: str = "",
    model: Annotated[str, Parameter(alias="-m")] = "smollm2",
    engine_url: str | None = None,
    harness_install: str | None = None,
    sandbox: str = "auto",
    deadline: float | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    run_dir: Path | None = None,
    resume: bool = False,
) -> int:
    """Run a harness on tasks and record branch graphs; no training.

    Parameters
    ----------
    tasks
        A task folder, or a folder of task folders (Harbor or NL2RepoBench layout).
    harness
        Preset name, path of a preset.toml, `oracle` (the task's solution) or `nop` (nothing).
    group_size
        Executions of each task.
    jobs
        Executions at the same time.
    only
        Comma-separated names of the tasks to take.
    model
        Model folder, `smollm2` or `tiny`; served by the embedded engine unless --engine-url is given. Its tokenizer is always used.
    engine_url
        A running SGLang server, or anything that speaks its /generate.
    harness_install
        Folder of the harness's installation, when it is not the preset's default.
    sandbox
        auto, bwrap, unshare, podman, docker or process (no isolation).
    deadline
        Upper bound in seconds on an agent's time; the task's own limit holds when it is shorter.
    temperature, max_new_tokens
        Sampling, pinned by the gateway whatever the harness asks for.
    run_dir
        Where to record; the default is ./runs/TIME-run.
    resume
        Go on with the run in --run-dir: finished executions are kept, the others start again.
    """
    console = Console()
    if group_size < 1:
        raise ConfigError(f"--group-size must be at least 1, not {group_size}")
    if resume and run_dir is None:
        raise ConfigError("--resume needs --run-dir: the run to go on with (`gyre runs ls` lists them)")
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, not {jobs}")
    found = load_tasks(tasks, only=[name for name in only.split(",") if name] or None)
    agent = make_agent(harness, harness_install)
    anyio.run(resolve, sandbox)  # a machine without such sandboxes is told once, before anything is recorded
    settings = RunnerSettings(sandbox=sandbox, deadline_s=checked_deadline(deadline))
    sampling = sampling_of(temperature, max_new_tokens)
    model_dir = resolve_model(model, console) if agent.needs_model else None
    info = RunInfo("run", time.time(), model if model_dir else "", agent.name, [t.name for t in found], group_size)
    folder = make_run_dir(run_dir, "run")
    with held(folder):
        if resume:
            info = refuse_another_run(folder, info)
        plan = load_or_make_plan(folder, lambda: plan_groups(found, group_size), resume=resume)
        info.write(folder)

        async def work() -> list[Finished]:
            async with AsyncExitStack() as stack:
                url = engine_url or ""
                if model_dir is not None and not url:
                    with console.status("starting the engine"):
                        url = await stack.enter_async_context(embedded_engine(model_dir, folder))
                return await _execute(folder, found, plan, agent, settings, sampling, jobs, model_dir, url, console)

        try:
            finished = anyio.run(work)
        except KeyboardInterrupt:
            console.print(f"stopped; the same command with --run-dir {folder} --resume goes on", soft_wrap=True)
            raise
    print_report(console, folder, finished)
    return 0 if any(f.outcome.valid for f in finished) or not finished else 1


async def _execute(
    folder: Path,
    tasks: Sequence[Task],
    plan: Sequence[PlannedExecution],
    agent: Agent,
    settings: RunnerSettings,
    sampling: SamplingConfig,
    jobs: int,
    model_dir: Path | None,
    engine_url: str,
    console: Console,
) -> list[Finished]:
    by_name = {task.name: task for task in tasks}
    missing = sorted({line.task for line in plan} - by_name.keys())
    if missing:
        raise ConfigError(f"the run's plan names tasks that are not there: {', '.join(missing)}")
    orders = [ExecutionOrder(line.execution, line.group, by_name[line.task]) for line in plan]
    ended = sealed_outcomes(folder)
    finished = [Finished(order, ended[order.execution]) for order in orders if order.execution in ended]
    todo = [order for order in orders if order.execution not in ended]
    view = RunView(console, f"{agent.name} on {len(tasks)} tasks", total=len(todo))
    if finished:
        view.note(f"{len(finished)} executions ended earlier and are kept")
    async with _gateway(folder, model_dir, engine_url, sampling) as (gateway, port):
        runner = Runner(gateway, port, agent, settings, folder, view.report)
        with view.live():
            async for one in Pool(runner, jobs).run_all(todo):
                finished.append(one)
    return finished


@asynccontextmanager
async def _gateway(
    folder: Path, model_dir: Path | None, engine_url: str, sampling: SamplingConfig
) -> AsyncIterator[tuple[Recording, int]]:
    """The run's gateway and its port; for an agent that asks no model just the logs."""
    if model_dir is not None:
        async with open_gateway(folder, model_dir, engine_url, sampling) as opened:
            yield opened
        return
    recording = ModelFreeRecording(folder)
    try:
        yield recording, 0
    finally:
        with anyio.CancelScope(shield=True):
            await recording.aclose()
