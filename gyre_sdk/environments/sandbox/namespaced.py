"""Sandboxes of Linux namespaces over an overlay of a root file system: backends `bwrap` and `unshare`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gyre_sdk.environments.sandbox import archive, disk, journal, layers, online
from gyre_sdk.environments.sandbox.base import (
    DEFAULT_PATH,
    PRIVATE,
    Capabilities,
    Command,
    ExecResult,
    Sandbox,
    SandboxSpec,
)
from gyre_sdk.environments.sandbox.keeper import cgroups
from gyre_sdk.environments.sandbox.link import Link, open_box
from gyre_sdk.environments.sandbox.output import Drain, decoded
from gyre_sdk.environments.sandbox.proxy import to_allowed_hosts
from gyre_sdk.environments.sandbox.relay import Relay, Target, to_port
from gyre_sdk.errors import SandboxError

_START_PATIENCE_S = 60.0
_STOP_PATIENCE_S = 30.0
_HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"


class NamespaceSandbox(Sandbox):
    """One sandbox. `backend` is 'bwrap' or 'unshare': who makes the namespaces; everything else is the same."""

    def __init__(self, spec: SandboxSpec, backend: str) -> None:
        self._spec = spec
        self._backend = backend
        self.name = journal.prefix() + secrets.token_hex(5)
        self.link: Link | None = None
        self.folder: Path | None = None
        self.relays: list[Relay] = []
        self.drains: set[Drain] = set()
        self.proxy_env: dict[str, str] = {}
        self._capabilities = _capabilities()

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
        """What this machine's control groups and this backend enforce."""
        return self._capabilities

    async def start(self) -> None:
        """Start, in tens of milliseconds. Raises SandboxError and leaves nothing."""
        if self.link is not None:
            raise SandboxError("the sandbox was started already")
        try:
            self.folder = journal.open_entry(self.name, self.backend)
            self.link = Link(open_box())
            message = await self._start_message(self.folder)
            answer, _ = await asyncio.wait_for(self.link.ask("start", **message), _START_PATIENCE_S)
            journal.add_facts(self.folder, pids=[answer["pid"], answer["keeper"]], groups=answer["groups"])
            await self._prepare()
        except OSError as error:
            await self.stop()
            raise SandboxError(f"sandbox ({self.backend}): {error}") from error
        except BaseException:  # cleans up and raises again
            await self.stop()
            raise

    async def _start_message(self, folder: Path) -> dict[str, Any]:
        spec, limits = self.spec, self.spec.limits
        mounts = [(str(source), target) for source, target in spec.read_only_mounts.items()]
        if spec.network.mode != "off" and (authorities := online.authorities()) is not None:
            mounts.append((str(authorities), online.CA_AT))
        if spec.rootfs is None:
            mounts = [(path, path) for path in layers.submounts()] + mounts
        message = {
            "folder": str(folder),
            "backend": self.backend,
            "network": "host" if spec.network.mode == "on" else "own",
            "layers": list(map(str, spec.layers)),
            "base": str(spec.rootfs or "/"),
            "folders": [spec.workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts"],
            "mask": None if spec.rootfs else layers.mask(spec.masks),
            "etc": {"hosts": _HOSTS, "hostname": "sandbox\n"} if spec.network.mode != "on" else _online_etc(spec),
            "read_only": mounts,
            "limits": {"cpus": limits.cpus, "memory_mb": limits.memory_mb, "pids": limits.pids},
        }
        if spec.keep_layer is not None:
            message["keep_layer"] = str(spec.keep_layer)
        return message | await disk.scratch(folder, limits.disk_mb)

    async def _prepare(self) -> None:
        """The proxy, when only some hosts may be reached."""
        if self.spec.network.mode == "allow-list":
            port = await self._listen(to_allowed_hosts(self.spec.network.hosts))
            url = f"http://127.0.0.1:{port}"
            names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
            self.proxy_env = dict.fromkeys(names, url) | {
                "no_proxy": "localhost,127.0.0.1",
                "NO_PROXY": "localhost,127.0.0.1",
            }

    async def stop(self, *, keep: bool = False) -> None:
        """End every process and remove everything; with `keep` the top layer goes where the spec's `keep_layer` says."""
        link, self.link = self.link, None
        for relay in self.relays:
            await relay.close()
        self.relays.clear()
        if link is not None and not link.closed:
            with contextlib.suppress(SandboxError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(link.ask("stop", keep=keep)), _STOP_PATIENCE_S)
            link.close()
        for drain in self.drains:
            drain.close()
        self.drains.clear()
        folder, self.folder = self.folder, None
        if folder is not None and folder.exists():
            await asyncio.to_thread(journal.forget, folder)

    def _live(self) -> Link:
        if self.link is None:
            raise SandboxError("the sandbox is not running")
        return self.link

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        base = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
        reach = online.settings() if self.spec.network.mode != "off" else {}
        return {**base, **reach, **self.proxy_env, **self.spec.env, **env}

    async def run(self, command: Command) -> ExecResult:
        """See Sandbox."""
        tell = decoded(command.on_output) if command.on_output is not None else None
        out, err = Drain(tell), Drain(tell)
        self.drains |= {out, err}
        out.on_end = err.on_end = self.drains.discard
        fields = self._fields(command)
        fields["private"] = [(mount.name, str(mount.source or ""), mount.target) for mount in command.private]
        fields["capabilities"] = ["sys_nice"] if command.trusted else []
        request, ended = await self._start_child(fields, out, err)
        timed_out = False
        try:
            rc = await asyncio.wait_for(asyncio.shield(ended), command.timeout)
        except TimeoutError:
            timed_out = True
            rc = await self._kill(request, ended)
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(request, ended))
            raise
        await out.finish()
        await err.finish()
        return ExecResult(out.text(), err.text(), rc, timed_out, out.truncated or err.truncated)

    def _fields(self, command: Command) -> dict[str, Any]:
        return {
            "argv": list(command.argv),
            "cwd": command.cwd or self.spec.workdir,
            "env": self._environment(command.env),
            "user": command.user if command.user is not None else self.spec.user,
            "file_size_mb": self.spec.limits.disk_mb,
        }

    async def _start_child(self, fields: dict[str, Any], out: Drain, err: Drain) -> tuple[int, asyncio.Future[int]]:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return await self._live().run("exec", fds=[null, out.write_end, err.write_end], **fields)
        except BaseException:  # cleans up and raises again
            out.close()
            err.close()
            raise
        finally:
            os.close(null)
            out.handed_over()
            err.handed_over()

    async def _kill(self, request: int, ended: asyncio.Future[int]) -> int:
        """End one command's tree; its exit code, or -9 when its sandbox is gone, which ends everything in it."""
        try:
            link = self._live()
            for _ in range(5):
                if ended.done():
                    break
                await link.ask("kill", target=request)
                await asyncio.wait({ended}, timeout=2)
            return await ended
        except SandboxError:
            return -signal.SIGKILL

    async def launch(self, command: Command, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> NamespaceProcess:
        """See Sandbox."""
        out, err = Drain(into=stdout, drop=stdout is None), Drain(into=stderr, drop=stderr is None)
        self.drains |= {out, err}
        out.on_end = err.on_end = self.drains.discard
        request, ended = await self._start_child(self._fields(command), out, err)
        return NamespaceProcess(self, request, ended, (out, err))

    async def upload(self, source: Path, target: str, *, fresh: bool = False) -> None:
        """See Sandbox.upload."""
        if not source.exists():
            raise SandboxError(f"no file {source} to copy into the sandbox")
        place, _, name = target.rstrip("/").rpartition("/")
        folder = target if source.is_dir() or target.startswith(PRIVATE) else (place or "/")
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        problem = Drain()
        try:
            _, ended = await self._live().run(
                "put", fds=[read_end, problem.write_end], target=folder, fresh=fresh and source.is_dir(),
                file_size_mb=self.spec.limits.disk_mb,
            )  # fmt: skip
        except BaseException:  # cleans up and raises again
            os.close(write_end)
            problem.close()
            raise
        finally:
            os.close(read_end)
        await asyncio.to_thread(archive.pack, source, write_end, name=name)
        rc = await ended
        await problem.finish()
        problem.close()
        if rc != 0:
            raise SandboxError(f"copying {source.name} to {target} in the sandbox failed: {problem.text().strip()}")

    async def download(self, source: str, target: Path, *, limit_mb: int = 1024) -> None:
        """See Sandbox.download."""
        single = False
        if not source.startswith(PRIVATE):
            kind = await self.exec(f"test -d {shlex.quote(source)}", cwd="/", timeout=30)
            single = kind.rc != 0
        if not single:
            target.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        problem = Drain()
        try:
            _, ended = await self._live().run("get", fds=[write_end, problem.write_end], source=source)
        except BaseException:  # cleans up and raises again
            os.close(read_end)
            problem.close()
            raise
        finally:
            os.close(write_end)
        failure: SandboxError | None = None
        try:
            await asyncio.to_thread(archive.unpack, read_end, target, single=single, limit_mb=limit_mb)
        except SandboxError as error:
            failure = error
        rc = await ended
        await problem.finish()
        problem.close()
        told = problem.text().strip()
        if told or failure or rc:
            raise SandboxError(f"copying {source} out of the sandbox failed: {told or failure or rc}")

    async def kill_all(self, *, keep_listening: bool = False) -> list[str]:
        """See Sandbox.kill_all."""
        answer, _ = await self._live().ask("kill_all", keep_listening=keep_listening)
        kept: list[str] = answer["kept"]
        return kept

    async def scrub(self) -> list[str]:
        """See Sandbox.scrub."""
        told = Drain()
        try:
            _, ended = await self._live().run("scrub", fds=[told.write_end])
        finally:
            told.handed_over()
        rc = await ended
        await told.finish()
        told.close()
        if rc != 0:
            raise SandboxError(f"the sandbox could not be scrubbed: {told.text().strip()}")
        return told.text().splitlines()

    async def expose(self, port_outside: int) -> int:
        """See Sandbox.expose. The port has the same number inside, unless something there holds it."""
        if self.spec.network.mode == "on":
            return port_outside
        return await self._listen(to_port(port_outside), port_outside)

    async def _listen(self, target: Target, wanted: int = 0) -> int:
        try:
            listener, port = await self._live().listen(wanted)
        except SandboxError:
            listener, port = await self._live().listen()
        listener.setblocking(False)
        relay = Relay(listener, target)
        self.relays.append(relay)
        await relay.start()
        return port


class NamespaceProcess:
    """A harness running inside."""

    def __init__(
        self, sandbox: NamespaceSandbox, request: int, ended: asyncio.Future[int], drains: tuple[Drain, Drain]
    ) -> None:
        self.sandbox = sandbox
        self.request = request
        self.ended = ended
        self.drains = drains

    @property
    def returncode(self) -> int | None:
        """None while it runs (or when the sandbox ended first)."""
        if not self.ended.done() or self.ended.exception() is not None:
            return None
        return self.ended.result()

    async def wait(self) -> int:
        """The exit code, once its output is written out."""
        rc = await asyncio.shield(self.ended)
        for drain in self.drains:
            await drain.finish()
        return rc

    async def kill(self) -> None:
        """End it with its descendants and its session."""
        link = self.sandbox.link
        if link is None or link.closed:
            return
        if not self.ended.done():
            with contextlib.suppress(SandboxError):
                await self.sandbox._kill(self.request, self.ended)
        for drain in self.drains:
            await drain.finish()


def _online_etc(spec: SandboxSpec) -> dict[str, str]:
    """The host's names stay resolvable; localhost must be there, and a base image may have no resolver."""
    hosts = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
    files = {"hosts": hosts if "localhost" in hosts else _HOSTS + hosts}
    if spec.rootfs is not None and Path("/etc/resolv.conf").exists():
        files["resolv.conf"] = Path("/etc/resolv.conf").read_text()
    return files


def _capabilities() -> Capabilities:
    parents = cgroups.parents()
    return Capabilities(
        network_off=True,
        network_allow_list=True,
        memory_limit="memory" in parents,
        cpu_limit="cpu" in parents,
        pids_limit="pids" in parents,
        disk_limit=True,
        kills_all=True,
        rootfs=True,
        private_mounts=True,
    )
