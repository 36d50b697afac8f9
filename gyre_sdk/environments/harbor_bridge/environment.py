"""A Harbor environment that is one of our sandboxes: `harbor run --env gyre_sdk.environments.harbor_bridge.environment:GyreEnvironment`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gyre_sdk.environments.prepare import TaskSandbox
from gyre_sdk.environments.sandbox.base import Limits, Network
from gyre_sdk.environments.task import Environment
from gyre_sdk.errors import MissingExtraError, SandboxError

try:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities
except ImportError as error:
    raise MissingExtraError("harbor", "harbor") from error


class GyreEnvironment(BaseEnvironment):  # type: ignore[misc]
    """Backend from $GYRE_SANDBOX (default auto). `keyword` arguments of Harbor's own are passed through."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sandbox: TaskSandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Harbor's name for it."""
        return "gyre"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What Harbor may ask for."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError("docker-compose.yaml needs docker or podman; Gyre's sandboxes replay a Dockerfile")

    async def start(self, force_build: bool) -> None:
        """Build what must be built and start."""
        config = self.task_env_config
        has_file = (self.environment_dir / "Dockerfile").is_file()
        default = Limits()
        environment = Environment(
            folder=self.environment_dir if has_file else None,
            image=None if has_file else config.docker_image,
            env=dict(getattr(config, "env", None) or {}),
            limits=Limits(
                cpus=getattr(config, "cpus", None),
                memory_mb=getattr(config, "memory_mb", None) or default.memory_mb,
                disk_mb=getattr(config, "storage_mb", None) or default.disk_mb,
            ),
            build_timeout_s=float(getattr(config, "build_timeout_sec", 600.0)),
        )
        from gyre_sdk.environments import dockerfile

        workdir = getattr(config, "workdir", None) or (
            dockerfile.workdir(self.environment_dir / "Dockerfile") if has_file else None
        )
        self._sandbox = TaskSandbox(
            self.environment_name,
            environment,
            backend=os.environ.get("GYRE_SANDBOX", "auto"),
            workdir=workdir or "/app",
            read_only_mounts={},
            network=Network("off" if self._offline() else "on"),
            limits=environment.limits,
            user=None,
        )
        await self._sandbox.start()
        gateway = os.environ.get("GYRE_GATEWAY_PORT")
        if gateway:  # an agent installed in the sandbox reaches the gateway, whatever the network policy
            await self._sandbox.expose(int(gateway))

    def _offline(self) -> bool:
        policy = getattr(self, "network_policy", None)
        mode = str(getattr(getattr(policy, "network_mode", ""), "value", ""))
        return mode == "no-network" or getattr(self.task_env_config, "allow_internet", True) is False

    @property
    def sandbox(self) -> TaskSandbox:
        """The running sandbox. Raises SandboxError."""
        if self._sandbox is None:
            raise SandboxError("the sandbox is not running")
        return self._sandbox

    async def stop(self, delete: bool) -> None:
        """Everything goes, whatever `delete` says: nothing of a sandbox can be kept."""
        if self._sandbox is not None:
            await self._sandbox.stop()
            self._sandbox = None

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy in."""
        await self.sandbox.upload(Path(source_path), str(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy in."""
        await self.sandbox.upload(Path(source_dir), str(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy out."""
        await self.sandbox.download(str(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy out."""
        await self.sandbox.download(str(source_dir), Path(target_dir))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
        **more: Any,
    ) -> ExecResult:
        """Run a command. A timeout is told as exit code 124."""
        result = await self.sandbox.exec(
            command, cwd=cwd, env=env, timeout=timeout_sec, user=None if user is None else str(user)
        )
        return ExecResult(
            stdout=result.stdout, stderr=result.stderr, return_code=124 if result.timed_out else result.rc
        )
