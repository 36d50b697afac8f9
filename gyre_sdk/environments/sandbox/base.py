"""What a sandbox is, and its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_LIMIT = 16 << 20
"""Bytes kept of each of a command's stdout and stderr; the rest is read and dropped."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend really does on this machine."""

    network_off: bool = False
    network_allow_list: bool = False
    memory_limit: bool = False
    cpu_limit: bool = False
    pids_limit: bool = False
    disk_limit: bool = False
    kills_all: bool = False
    """`stop` and `kill_all` leave no descendant, whatever it did to get away."""
    persistent_processes: bool = True
    """A service started by one `exec` is there for the next."""
    rootfs: bool = False
    """Has a root file system of its own: /app, /tests and /logs are real paths in it."""
    private_mounts: bool = False
    """`exec` can show a command folders that nothing else in the sandbox sees."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one sandbox. None: no bound."""

    cpus: float | None = None
    memory_mb: int | None = 4096
    pids: int | None = 1024
    disk_mb: int | None = 10240
    """Bound on everything written in the sandbox, and so on each file."""


@dataclass(frozen=True, slots=True)
class Network:
    """off: loopback only. on: the host's network. allow-list: only `hosts`, through an HTTP(S) proxy that the environment names."""

    mode: Literal["off", "on", "allow-list"] = "off"
    hosts: tuple[str, ...] = ()
    """Host names for allow-list; `*.example.org` allows every name below it."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of. Paths inside it are absolute POSIX strings."""

    name: str = "sandbox"
    layers: tuple[Path, ...] = ()
    """Prepared layers on top of the host's masked root (or of `rootfs`), topmost first."""
    rootfs: Path | None = None
    """Folder that is the base instead of the host's own root."""
    image: str | None = None
    """Image for container backends."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/app"
    user: str | None = None
    limits: Limits = field(default_factory=Limits)
    network: Network = field(default_factory=Network)
    read_only_mounts: Mapping[Path, str] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    """Further folders of the host to hide, beside homes, work and data folders."""
    keep_layer: Path | None = None
    """Where the top layer is kept when the sandbox stops (it becomes a prepared layer); else it is removed."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. `rc` is the exit code, negative for a signal; 126 or 127 when it could not be started."""

    stdout: str
    stderr: str
    rc: int
    timed_out: bool = False
    truncated: bool = False


class SandboxProcess(Protocol):
    """A long-running command inside a sandbox."""

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """The exit code. Raises SandboxError when the sandbox ended first."""
        ...

    async def kill(self) -> None:
        """End it, its descendants and its session. Harmless when it has ended."""
        ...


PRIVATE = "private:"
"""`upload` to and `download` from `private:NAME` move a private folder's files, which nothing in the sandbox sees."""


@dataclass(frozen=True, slots=True)
class PrivateMount:
    """Something shown at `target` only to one command and its children: the private folder called `name`, writable (it counts to the
    memory limit), or a folder or file of this machine (`source`), read-only."""

    target: str
    name: str = ""
    source: Path | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """One command, as backends get it. `cwd`, `user`: None for the sandbox's own."""

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None
    on_output: Callable[[str], None] | None = None
    private: tuple[PrivateMount, ...] = ()
    trusted: bool = False


class Sandbox(ABC):
    """A place to run untrusted commands. Every method but `stop` raises SandboxError when the sandbox is not running."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What is enforced here."""

    @property
    @abstractmethod
    def spec(self) -> SandboxSpec:
        """What it is made of."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """Name of the backend."""

    @abstractmethod
    async def start(self) -> None:
        """Start. On an error nothing is left behind."""

    @abstractmethod
    async def stop(self) -> None:
        """End every process, remove everything. Harmless when repeated or when `start` failed."""

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        on_output: Callable[[str], None] | None = None,
        private: Sequence[PrivateMount] = (),
        trusted: bool = False,
    ) -> ExecResult:
        """Run `command` with bash. A timeout kills it with its descendants and is told in the result, not raised.

        `private` needs the capability private_mounts. `trusted` keeps the command's processes out of reach of the sandbox's others.
        """
        argv = ("/bin/bash", "-c", command)
        return await self.run(Command(argv, cwd, env or {}, user, timeout, on_output, tuple(private), trusted))

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        user: str | None = None,
    ) -> SandboxProcess:
        """Start a long-running command; its output goes to the given files as it comes, up to a limit."""
        return await self.launch(Command(tuple(argv), cwd, env or {}, user), stdout, stderr)

    @abstractmethod
    async def run(self, command: Command) -> ExecResult:
        """What `exec` does."""

    @abstractmethod
    async def launch(self, command: Command, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> SandboxProcess:
        """What `spawn` does."""

    @abstractmethod
    async def upload(self, source: Path, target: str, *, fresh: bool = False) -> None:
        """Copy a file to the path `target`, or a folder's contents into the folder `target`. `fresh` empties it first."""

    @abstractmethod
    async def download(self, source: str, target: Path, *, limit_mb: int = 1024) -> None:
        """Copy a file to the path `target`, or a folder's contents into the folder `target`. Links never lead out of it."""

    @abstractmethod
    async def kill_all(self, *, keep_listening: bool = False) -> list[str]:
        """End every process in the sandbox; with `keep_listening` services with a listening socket stay (names returned)."""

    async def scrub(self) -> list[str]:
        """Get ready to verify: remove what was planted inside to take over a verifier's interpreter or package installer (its paths
        are returned), and give back the room that was kept in reserve.

        Nothing where the backend can't tell what was added since the start.
        """
        return []

    @abstractmethod
    async def expose(self, port_outside: int) -> int:
        """A loopback port inside that leads to 127.0.0.1:`port_outside` here, whatever the network policy."""


class ForwardingSandbox(Sandbox):
    """Another sandbox, under this one's name: everything but `start` goes to `inner`."""

    @property
    @abstractmethod
    def inner(self) -> Sandbox:
        """The real one. Raises SandboxError before `start`."""

    @property
    def capabilities(self) -> Capabilities:
        """See Sandbox."""
        return self.inner.capabilities

    @property
    def spec(self) -> SandboxSpec:
        """See Sandbox."""
        return self.inner.spec

    @property
    def backend(self) -> str:
        """See Sandbox."""
        return self.inner.backend

    async def stop(self) -> None:
        """See Sandbox."""
        await self.inner.stop()

    async def run(self, command: Command) -> ExecResult:
        """See Sandbox."""
        return await self.inner.run(command)

    async def launch(self, command: Command, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> SandboxProcess:
        """See Sandbox."""
        return await self.inner.launch(command, stdout, stderr)

    async def upload(self, source: Path, target: str, *, fresh: bool = False) -> None:
        """See Sandbox."""
        await self.inner.upload(source, target, fresh=fresh)

    async def download(self, source: str, target: Path, *, limit_mb: int = 1024) -> None:
        """See Sandbox."""
        await self.inner.download(source, target, limit_mb=limit_mb)

    async def kill_all(self, *, keep_listening: bool = False) -> list[str]:
        """See Sandbox."""
        return await self.inner.kill_all(keep_listening=keep_listening)

    async def scrub(self) -> list[str]:
        """See Sandbox."""
        return await self.inner.scrub()

    async def expose(self, port_outside: int) -> int:
        """See Sandbox."""
        return await self.inner.expose(port_outside)
