"""Sandboxes of a container engine's command line: `podman` or `docker`. For tasks that need an image or a full Dockerfile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gyre_sdk.environments.sandbox import archive, journal
from gyre_sdk.environments.sandbox.base import DEFAULT_PATH, Capabilities, Command, ExecResult, Sandbox, SandboxSpec
from gyre_sdk.environments.sandbox.keeper import kernel
from gyre_sdk.environments.sandbox.output import Drain, decoded
from gyre_sdk.environments.sandbox.relay import Relay, to_port
from gyre_sdk.errors import SandboxError

_START_S = 600.0
_CALL_S = 120.0
_DEFAULT_IMAGE = "debian:bookworm-slim"
_SHELL = """/bin/bash -c '"$@"; exit $?' gyre "$@\""""
"""setsid tells a signal as an exit code like any other; a shell tells it as 128 and its number."""
_MOST_FILES, _MOST_PROCESSES = 1 << 20, 1 << 15
_INIT = "trap '' TERM INT HUP; while :; do sleep 3600 & wait; done"
"""As process 1 it can't be killed from inside, and reaps what is orphaned."""


def engine_problem(engine: str) -> str:
    """Why the engine can't be used; empty when it answers."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    try:
        answer = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{engine} does not answer: {error}"
    if answer.returncode != 0 or "Cannot connect" in answer.stderr + answer.stdout:
        lines = [line for line in (answer.stderr + answer.stdout).strip().splitlines() if line]
        return f"{engine} does not answer: {lines[-1] if lines else 'no message'}"
    return ""


def _own_limits() -> list[str]:
    """podman asks for more open files and processes than root without CAP_SYS_RESOURCE may give (inside a container or a small VM):
    ask for what we have. Processes are limited by the control group anyway."""
    files, processes = (resource.getrlimit(which)[1] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    files = _MOST_FILES if files == resource.RLIM_INFINITY else min(files, _MOST_FILES)
    processes = _MOST_PROCESSES if processes == resource.RLIM_INFINITY else min(processes, _MOST_PROCESSES)
    return ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}"]


class ContainerSandbox(Sandbox):
    """One container."""

    def __init__(self, spec: SandboxSpec, engine: str) -> None:
        if spec.network.mode == "allow-list":
            raise SandboxError(f"the {engine} backend can't limit the network to some hosts; use bwrap")
        self._spec = spec
        self._backend = engine
        self.name = journal.prefix() + secrets.token_hex(5)
        self.folder: Path | None = None
        self.relays: list[Relay] = []
        self.running = False
        self.count = 0

    @property
    def spec(self) -> SandboxSpec:
        """See Sandbox."""
        return self._spec

    @property
    def backend(self) -> str:
        """See Sandbox."""
        return self._backend

    @property
    def capabilities(self) -> Capabilities:
        """As the engine promises."""
        return Capabilities(
            network_off=True, memory_limit=True, cpu_limit=True, pids_limit=True, kills_all=True, rootfs=True
        )

    async def start(self) -> None:
        """Pull the image when it is not there, and start. Raises SandboxError."""
        self.folder = journal.open_entry(self.name, self.backend)
        journal.name_container(self.folder, [self.backend, self.name])
        limits = self.spec.limits
        argv = ["run", "-d", "--name", self.name, "--hostname", "sandbox", "--entrypoint", "/bin/sh"]
        argv += ["--network", "bridge" if self.spec.network.mode == "on" else "none"]
        argv += [f"--cpus={limits.cpus}"] if limits.cpus else []
        argv += [f"--memory={limits.memory_mb}m"] if limits.memory_mb else []
        argv += [f"--pids-limit={limits.pids}"] if limits.pids else []
        argv += _own_limits() if self.backend == "podman" else []
        for source, target in self.spec.read_only_mounts.items():
            argv += ["-v", f"{source}:{target}:ro"]
        argv += [self.spec.image or _DEFAULT_IMAGE, "-c", _INIT]
        try:
            await self._call(argv, timeout=_START_S)
            self.running = True
            folders = " ".join(
                map(shlex.quote, (self.spec.workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts"))
            )
            await self._call(["exec", "-u", "0", self.name, "mkdir", "-p", *shlex.split(folders)])
        except BaseException:  # cleans up and raises again
            await self.stop()
            raise

    async def stop(self) -> None:
        """Remove the container, and with it all its processes."""
        self.running = False
        for relay in self.relays:
            await relay.close()
        self.relays.clear()
        folder, self.folder = self.folder, None
        if folder is not None:
            with contextlib.suppress(SandboxError):
                await self._call(["rm", "-f", self.name])
            await asyncio.to_thread(journal.forget, folder)

    async def _call(self, argv: Sequence[str], *, timeout: float = _CALL_S) -> str:
        """One call of the engine; its stdout. Raises SandboxError with its last words."""
        process = await asyncio.create_subprocess_exec(
            self.backend, *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise SandboxError(f"{self.backend} {argv[0]}: {err.decode(errors='replace').strip()[-300:]}")
        return out.decode(errors="replace")

    def _exec_argv(self, command: Command, mark: str) -> list[str]:
        if not self.running:
            raise SandboxError("the sandbox is not running")
        given = {**self.spec.env, **command.env, "GYRE_MARK": mark}
        settings = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "TERM": "dumb", **given}
        if not given.get("PATH"):
            settings.pop("PATH")  # the image's own
        call = [self.backend, "exec", "-w", command.cwd or self.spec.workdir]
        for name, value in settings.items():
            call += ["-e", f"{name}={value}"]
        wanted = command.user if command.user is not None else self.spec.user
        call += ["-u", wanted] if wanted is not None else []
        # A session of its own, marked so that it can be found again and killed.
        return [*call, self.name, "/bin/bash", "-c", f": {mark}; exec setsid -w {_SHELL}", mark, *command.argv]

    async def _start_process(self, argv: Sequence[str], out: Drain, err: Drain) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.DEVNULL, stdout=out.write_end, stderr=err.write_end, start_new_session=True
            )
        except OSError as error:
            out.close()
            err.close()
            raise SandboxError(f"{self.backend} could not be started: {error}") from error
        finally:
            out.handed_over()
            err.handed_over()

    def _mark(self) -> str:
        self.count += 1
        return f"gyre-{self.name}-{self.count}"

    async def _kill(self, mark: str, process: asyncio.subprocess.Process) -> int:
        """End what the marked command started: its sessions, found by the mark in their environment."""
        script = (
            f"for p in /proc/[0-9]*; do if tr '\\0' '\\n' < $p/environ 2>/dev/null | grep -qx GYRE_MARK={mark}; then "
            "kill -9 ${p#/proc/}; fi; done"
        )
        for _ in range(3):
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._call(["exec", "-u", "0", self.name, "/bin/bash", "-c", script])
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return -9

    async def run(self, command: Command) -> ExecResult:
        """See Sandbox."""
        if command.private:
            raise SandboxError(f"the {self.backend} backend has no private mounts")
        tell = decoded(command.on_output) if command.on_output is not None else None
        out, err, mark = Drain(tell), Drain(tell), self._mark()
        process = await self._start_process(self._exec_argv(command, mark), out, err)
        timed_out = False
        try:
            rc = await asyncio.wait_for(process.wait(), command.timeout)
        except TimeoutError:
            timed_out, rc = True, await self._kill(mark, process)
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(mark, process))
            raise
        await out.finish()
        await err.finish()
        out.close()
        err.close()
        return ExecResult(out.text(), err.text(), rc, timed_out, out.truncated or err.truncated)

    async def launch(self, command: Command, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> ContainerProcess:
        """See Sandbox."""
        out, err = Drain(into=stdout, drop=stdout is None), Drain(into=stderr, drop=stderr is None)
        mark = self._mark()
        process = await self._start_process(self._exec_argv(command, mark), out, err)
        return ContainerProcess(self, mark, process, (out, err))

    async def upload(self, source: Path, target: str, *, fresh: bool = False) -> None:
        """See Sandbox.upload."""
        if not source.exists():
            raise SandboxError(f"no file {source} to copy into the sandbox")
        folder, _, name = target.rstrip("/").rpartition("/")
        folder = target if source.is_dir() else (folder or "/")
        if fresh and source.is_dir():
            await self._call(["exec", "-u", "0", self.name, "rm", "-rf", target])
        await self._call(["exec", "-u", "0", self.name, "mkdir", "-p", folder])
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        process = await asyncio.create_subprocess_exec(
            self.backend,
            "cp",
            "-",
            f"{self.name}:{folder}",
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        os.close(read_end)
        await asyncio.to_thread(archive.pack, source, write_end, name=name)
        _, err = await process.communicate()
        if process.returncode != 0:
            raise SandboxError(
                f"copying {source.name} to {target} in the sandbox failed: {err.decode(errors='replace').strip()[-200:]}"
            )

    async def download(self, source: str, target: Path, *, limit_mb: int = 1024) -> None:
        """See Sandbox.download."""
        place = shlex.quote(source)
        asked = f"if test -d {place}; then echo folder; elif test -e {place}; then echo file; fi"
        found = await self.exec(asked, cwd="/")
        kind = found.stdout.strip()
        if not kind:
            raise SandboxError(f"copying {source} out of the sandbox failed: no such file")
        if kind == "folder":
            target.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        inside = source.rstrip("/") + ("/." if kind == "folder" else "")
        process = await asyncio.create_subprocess_exec(
            self.backend,
            "cp",
            f"{self.name}:{inside}",
            "-",
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=subprocess.DEVNULL,
        )
        os.close(write_end)
        try:
            await asyncio.to_thread(archive.unpack, read_end, target, single=kind == "file", limit_mb=limit_mb)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def kill_all(self, *, keep_listening: bool = False) -> list[str]:
        """See Sandbox.kill_all. Services are not told apart here: all end."""
        with contextlib.suppress(SandboxError):
            await self._call(["exec", "-u", "0", self.name, "/bin/bash", "-c", "kill -9 -1; exit 0"])
        return []

    async def expose(self, port_outside: int) -> int:
        """See Sandbox.expose. Needs the engine on this machine, and root, to enter the container's network namespace."""
        state = json.loads(await self._call(["inspect", "--format", "{{json .State}}", self.name]))
        try:
            listener = await asyncio.to_thread(_listen_in, int(state["Pid"]))
        except OSError as error:
            raise SandboxError(f"no port could be opened in the container's network: {error}") from error
        relay = Relay(listener, to_port(port_outside))
        self.relays.append(relay)
        await relay.start()
        return int(listener.getsockname()[1])


def _listen_in(pid: int) -> socket.socket:
    """A listening loopback socket in the network of another process. Only this thread goes there, and it comes back."""
    ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        kernel.setns(theirs, kernel.CLONE_NEWNET)
        try:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            listener.setblocking(False)
            return listener
        finally:
            kernel.setns(ours, kernel.CLONE_NEWNET)
    finally:
        os.close(theirs)
        os.close(ours)


class ContainerProcess:
    """A harness running in a container."""

    def __init__(
        self, sandbox: ContainerSandbox, mark: str, process: asyncio.subprocess.Process, drains: tuple[Drain, Drain]
    ) -> None:
        self.sandbox = sandbox
        self.mark = mark
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
        """End it and its descendants."""
        if self.process.returncode is None:
            await self.sandbox._kill(self.mark, self.process)
        for drain in self.drains:
            await drain.finish()
            drain.close()
