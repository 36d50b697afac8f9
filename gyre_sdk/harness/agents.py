"""What plays the agent in a sandbox: an installed CLI harness (by preset), the task's own solution, or nothing."""

from __future__ import annotations

import logging
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

import anyio

from gyre_sdk.errors import ConfigError, HarnessError, SandboxError
from gyre_sdk.harness.preset import HarnessPreset, fill

if TYPE_CHECKING:
    from gyre_sdk.environments import Sandbox, Task

log = logging.getLogger(__name__)

CONFIG_DIR = "/tmp/gyre-harness"
"""Where a harness's configuration and trajectory live inside the sandbox."""
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What an agent is told about its execution."""

    task: Task
    instruction: str
    base_url: str
    """The gateway as seen from inside the sandbox, without /v1."""
    token: str
    model: str
    deadline_s: float
    log: Path
    """File outside the sandbox that takes the harness's output."""
    keep: Path
    """Folder outside the sandbox that takes what the harness wrote about its run."""


class Agent(Protocol):
    """Runs one execution. A cancellation (the deadline, Ctrl-C) must end everything it started."""

    name: str
    needs_model: bool
    exit_ok: tuple[int, ...]
    """Exit codes that mean the harness itself worked."""

    def mounts(self) -> Mapping[Path, str]:
        """Folders of this machine that must be visible read-only inside the sandbox, at the given paths."""
        ...

    async def run(self, sandbox: Sandbox, context: AgentContext) -> int:
        """Returns the exit code. Raises HarnessError when the harness could not be started at all."""
        ...


class CliAgent:
    """An unmodified CLI harness, started whole inside the sandbox."""

    needs_model = True

    def __init__(self, preset: HarnessPreset, install: Path | None = None) -> None:
        self.preset = preset
        self.name = preset.name
        self.exit_ok = preset.exit_ok
        place = install or (Path(preset.install_dir) if preset.install_dir else None)
        self.install = place.expanduser().resolve() if place else None
        self.executable = self._find_executable()

    def _find_executable(self) -> str:
        word = self.preset.command[0]
        if self.install is not None:
            if not self.install.is_dir():
                raise ConfigError(f"harness {self.name}: no folder {self.install}.{self._how()}")
            for found in (self.install / "bin" / word, self.install / word):
                if found.is_file():
                    return str(found)
        if found_here := shutil.which(word, path=_SYSTEM_PATH):
            return found_here
        where = f"in {self.install / 'bin'} or " if self.install else ""
        raise ConfigError(f"harness {self.name}: {word!r} is not {where}among the system's programs.{self._how()}")

    def _how(self) -> str:
        return f" Install it: {self.preset.install}" if self.preset.install else ""

    def mounts(self) -> Mapping[Path, str]:
        """The installation, and the interpreter that its virtual environment stands on."""
        if self.install is None or self.install == Path("/usr"):
            return {}
        wanted = [self.install]
        config = self.install / "pyvenv.cfg"
        if config.is_file():
            lines = (line.partition("=") for line in config.read_text().splitlines())
            settings = {key.strip(): value.strip() for key, _, value in lines}
            home = Path(settings.get("home", "/usr/bin")).resolve()
            if home.name == "bin" and home.parent != Path("/usr"):
                wanted.append(home.parent)
        return {path: str(path) for path in wanted}

    def _values(self, context: AgentContext) -> dict[str, str]:
        return {
            "base_url": context.base_url,
            "token": context.token,
            "model": context.model,
            "instruction": context.instruction,
            "deadline_s": str(int(context.deadline_s)),
            "workdir": context.task.workdir,
            "config": CONFIG_DIR,
            "install": str(self.install or ""),
        }

    async def run(self, sandbox: Sandbox, context: AgentContext) -> int:
        """Start the CLI, wait for it, keep its trajectory. Cancelling kills it."""
        values = self._values(context)
        await self._write_files(sandbox, values)
        argv = [self.executable, *(fill(word, values) for word in self.preset.command[1:])]
        path = f"{self.install / 'bin'}:{_SYSTEM_PATH}" if self.install else _SYSTEM_PATH
        env = {"PATH": path, "HOME": f"{CONFIG_DIR}/home", "LANG": "C.UTF-8", "GYRE_DEADLINE_S": values["deadline_s"]}
        env |= {key: fill(text, values) for key, text in self.preset.env.items()}
        with context.log.open("ab") as log:
            process = await sandbox.spawn(argv, cwd=context.task.workdir, env=env, stdout=log, stderr=log)
            try:
                code = await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await process.kill()
                    await self._keep_trajectory(sandbox, context)
        if code == 127:
            raise HarnessError(f"{self.name} could not be started in the sandbox; see {context.log}")
        return code

    async def _write_files(self, sandbox: Sandbox, values: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory(prefix="gyre-") as folder:
            (Path(folder) / "home").mkdir()
            for name, text in self.preset.files.items():
                target = Path(folder) / PurePosixPath(fill(name, values))
                if not target.resolve().is_relative_to(Path(folder).resolve()):
                    raise ConfigError(f"harness {self.name}: file {name!r} leaves the harness's own folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(fill(text, values))
            await sandbox.upload(Path(folder), CONFIG_DIR)

    async def _keep_trajectory(self, sandbox: Sandbox, context: AgentContext) -> None:
        if not self.preset.trajectory:
            return
        source = fill(self.preset.trajectory, self._values(context))
        try:
            found = await sandbox.exec(f"test -f {shlex.quote(source)}", timeout=10)
            if found.rc == 0:
                context.keep.mkdir(parents=True, exist_ok=True)
                await sandbox.download(source, context.keep / PurePosixPath(source).name)
        except SandboxError as error:
            log.warning("%s: its trajectory could not be kept: %s", self.name, error)  # evidence, not the result
