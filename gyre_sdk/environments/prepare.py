"""The sandbox of one execution of a task: backend chosen, environment prepared, healthy, before the agent comes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gyre_sdk.environments.build import install_python, prepare, replay
from gyre_sdk.environments.sandbox import choose
from gyre_sdk.environments.sandbox.base import ForwardingSandbox, Limits, Network, Sandbox, SandboxSpec
from gyre_sdk.environments.task import Environment, Healthcheck, Task
from gyre_sdk.errors import SandboxError, TaskError


class TaskSandbox(ForwardingSandbox):
    """A sandbox that knows its task. `start` chooses the backend, builds what must be built and waits until it is healthy."""

    def __init__(
        self,
        name: str,
        environment: Environment,
        *,
        backend: str,
        workdir: str,
        read_only_mounts: Mapping[Path, str],
        network: Network,
        limits: Limits,
        user: str | None,
        files: Mapping[Path, str] | None = None,
    ) -> None:
        self.files = files or {}
        self.environment = environment
        self.wanted_backend = backend
        named = os.environ.get("GYRE_ROOTFS")
        self._spec = SandboxSpec(
            name=name,
            rootfs=Path(named) if named else None,
            image=environment.image,
            env=environment.env,
            workdir=workdir,
            user=user,
            limits=limits,
            network=network,
            read_only_mounts=read_only_mounts,
        )
        self._inner: Sandbox | None = None

    @property
    def inner(self) -> Sandbox:
        """The real sandbox. Raises SandboxError before `start`."""
        if self._inner is None:
            raise SandboxError("the sandbox is not running")
        return self._inner

    @property
    def spec(self) -> SandboxSpec:
        """What it is made of."""
        return self._inner.spec if self._inner is not None else self._spec

    @property
    def backend(self) -> str:
        """The backend's name, once chosen."""
        return self._inner.backend if self._inner is not None else self.wanted_backend

    async def start(self) -> None:
        """Raises SandboxError: also for a task that can't be run here, with the reason."""
        backend = await choose.resolve(self.wanted_backend)
        environment = self.environment
        try:
            prepared = await prepare(environment, backend, self._spec.rootfs)
        except TaskError as error:
            raise SandboxError(str(error)) from error
        spec = replace(
            self._spec,
            layers=prepared.layers,
            image=prepared.image or self._spec.image,
            env={**dict(prepared.env), **self._spec.env},
            user=self._spec.user or prepared.user,
        )
        self._inner = choose.create(spec, backend)
        await self._inner.start()
        if prepared.python is not None:
            await install_python(self._inner, prepared.python)
        if prepared.replay is not None and environment.folder is not None:
            await replay(self._inner, prepared.replay, environment.folder)
        for source, target in self.files.items():
            await self._inner.upload(source, target)
        if environment.healthcheck is not None:
            await wait_healthy(self._inner, environment.healthcheck)

    async def stop(self) -> None:
        """See Sandbox. Harmless before `start`."""
        if self._inner is not None:
            await self._inner.stop()


async def wait_healthy(sandbox: Sandbox, check: Healthcheck) -> None:
    """Wait until the task's own check succeeds. Raises SandboxError when it never does."""
    begun, failures, told = time.monotonic(), 0, ""
    while True:
        result = await sandbox.exec(check.command, timeout=check.timeout_s)
        if result.rc == 0 and not result.timed_out:
            return
        told = (result.stderr or result.stdout).strip()[-200:]
        if time.monotonic() - begun > check.start_period_s:
            failures += 1
        if failures >= max(1, check.retries):
            raise SandboxError(f"the environment's healthcheck failed {failures} times: {check.command[:80]}: {told}")
        await asyncio.sleep(check.interval_s)


def make_sandbox(
    task: Task,
    *,
    backend: str = "auto",
    read_only_mounts: Mapping[Path, str] | None = None,
    limits: Limits | None = None,
    network: Network | None = None,
) -> TaskSandbox:
    """The agent's sandbox for one execution of `task`, not started. `limits` and `network` override the task's own."""
    agent = task.steps[0].agent
    return TaskSandbox(
        task.name,
        task.environment,
        backend=backend,
        workdir=task.workdir,
        read_only_mounts=read_only_mounts or {},
        network=network or agent.network or task.environment.network,
        limits=limits or task.environment.limits,
        user=agent.user,
        files={task.folder / "start.md": f"{task.workdir}/start.md"} if task.repo is not None else None,
    )


def make_verifier_sandbox(task: Task, environment: Environment, *, backend: str, network: Network) -> TaskSandbox:
    """A fresh sandbox for a separate verifier, not started."""
    return TaskSandbox(
        f"{task.name}-verifier",
        environment,
        backend=backend,
        workdir=environment.workdir or task.workdir,
        read_only_mounts={},
        network=network,
        limits=environment.limits,
        user=None,
    )
