"""Plain processes in a temporary folder: no isolation at all. For tests and machines without namespaces; only by name.

Paths of the task (`/app`, `/tests`, `/logs`) are folders below the sandbox's own; commands find that folder in $GYRE_ROOT.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from gyre_sdk.environments.sandbox import archive
from gyre_sdk.environments.sandbox.base import DEFAULT_PATH, Capabilities, Command, ExecResult, Sandbox, SandboxSpec
from gyre_sdk.environments.sandbox.keeper import processes
from gyre_sdk.environments.sandbox.output import Drain, decoded
from gyre_sdk.errors import SandboxError


class ProcessSandbox(Sandbox):
    """One sandbox without walls. Its processes die with the session they were started in; one that leaves it may survive."""

    def __init__(self, spec: SandboxSpec) -> None:
        if spec.network.mode == "allow-list":
            raise SandboxError("the process backend can't limit the network to some hosts")
        self._spec = spec
        self.root: Path | None = None
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    @property
    def spec(self) -> SandboxSpec:
        """See Sandbox."""
        return self._spec

    @property
    def backend(self) -> str:
        """See Sandbox."""
        return "process"

    @property
    def capabilities(self) -> Capabilities:
        """Nothing is enforced."""
        return Capabilities()

    async def start(self) -> None:
        """Make the folder."""
        self.root = Path(tempfile.mkdtemp(prefix="gyre-process-")).resolve()
        for name in (self.spec.workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts", "/home"):
            self._inside(name).mkdir(parents=True, exist_ok=True)

    async def stop(self) -> None:
        """Kill what is known and remove the folder."""
        await self.kill_all()
        root, self.root = self.root, None
        if root is not None:
            await asyncio.to_thread(shutil.rmtree, root, True)

    def _inside(self, path: str) -> Path:
        if self.root is None:
            raise SandboxError("the sandbox is not running")
        if Path(path).is_relative_to(self.root):
            return Path(path)
        return self.root / os.path.normpath("/" + path).lstrip("/")

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        base = {
            "PATH": os.environ.get("PATH", DEFAULT_PATH),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HOME": str(self._inside("/home")),
            "GYRE_ROOT": str(self.root),
        }
        return {**base, **self.spec.env, **env}

    async def _start(self, command: Command, out: Drain, err: Drain) -> asyncio.subprocess.Process:
        argv = command.argv
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=self._inside(command.cwd or self.spec.workdir),
                env=self._environment(command.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out.write_end,
                stderr=err.write_end,
                start_new_session=True,
            )
        except OSError as error:
            out.close()
            err.close()
            raise SandboxError(f"{argv[0]} could not be started: {error}") from error
        out.handed_over()
        err.handed_over()
        self.processes[process.pid] = process
        return process

    async def run(self, command: Command) -> ExecResult:
        """See Sandbox. `user` and `trusted` change nothing here."""
        if command.private:
            raise SandboxError("the process backend has no private mounts")
        tell = decoded(command.on_output) if command.on_output is not None else None
        out, err = Drain(tell), Drain(tell)
        process = await self._start(command, out, err)
        timed_out = False
        try:
            rc = await asyncio.wait_for(process.wait(), command.timeout)
        except TimeoutError:
            timed_out = True
            rc = await self._end(process)
        except asyncio.CancelledError:
            await asyncio.shield(self._end(process))
            raise
        await out.finish()
        await err.finish()
        out.close()
        err.close()
        return ExecResult(out.text(), err.text(), rc, timed_out, out.truncated or err.truncated)

    async def _end(self, process: asyncio.subprocess.Process) -> int:
        if process.returncode is None:
            await asyncio.to_thread(_kill_tree, process.pid)
        return await process.wait()

    async def launch(self, command: Command, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> PlainProcess:
        """See Sandbox."""
        out, err = Drain(into=stdout, drop=stdout is None), Drain(into=stderr, drop=stderr is None)
        return PlainProcess(self, await self._start(command, out, err), (out, err))

    async def upload(self, source: Path, target: str, *, fresh: bool = False) -> None:
        """See Sandbox.upload."""
        place = self._inside(target)
        if not source.exists():
            raise SandboxError(f"no file {source} to copy into the sandbox")
        await asyncio.to_thread(_copy, source, place, fresh)

    async def download(self, source: str, target: Path, *, limit_mb: int = 1024) -> None:
        """See Sandbox.download."""
        place = self._inside(source)
        if not place.exists():
            raise SandboxError(f"copying {source} out of the sandbox failed: no such file")
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        single = not place.is_dir()
        if not single:
            target.mkdir(parents=True, exist_ok=True)
        packing = asyncio.to_thread(archive.pack, place, write_end, name=None)
        unpacking = asyncio.to_thread(archive.unpack, read_end, target, single=single, limit_mb=limit_mb)
        await asyncio.gather(packing, unpacking)

    async def kill_all(self, *, keep_listening: bool = False) -> list[str]:
        """Kills the sessions of everything started here."""
        for pid, process in list(self.processes.items()):
            await asyncio.to_thread(_kill_tree, pid)
            with contextlib.suppress(ProcessLookupError):
                await process.wait()
        self.processes.clear()
        return []

    async def expose(self, port_outside: int) -> int:
        """The host's loopback is the sandbox's."""
        return port_outside


class PlainProcess:
    """A harness running without walls."""

    def __init__(
        self, sandbox: ProcessSandbox, process: asyncio.subprocess.Process, drains: tuple[Drain, Drain]
    ) -> None:
        self.sandbox = sandbox
        self.process = process
        self.drains = drains

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """The exit code."""
        rc = await self.process.wait()
        for drain in self.drains:
            await drain.finish()
        return rc

    async def kill(self) -> None:
        """End it, its descendants and its session."""
        await self.sandbox._end(self.process)
        for drain in self.drains:
            await drain.finish()
            drain.close()


def _kill_tree(pid: int) -> None:
    if Path("/proc/self/stat").exists():
        processes.kill_tree(pid)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _copy(source: Path, place: Path, fresh: bool) -> None:
    if fresh and place.is_dir():
        shutil.rmtree(place)
    if source.is_dir():
        shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
