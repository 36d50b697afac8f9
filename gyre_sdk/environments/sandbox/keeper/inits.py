"""A sandbox's root (overlay of the lower layers, extra read-only mounts) and the init that holds its namespaces open."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import kernel
from .loop import mount_image

Spawn = Callable[[dict[str, Any], list[int]], int]
"""Forks a child that does a message, and returns its pid."""
_SHM_MB = 64
_PRIVATE_MB = 1024
_BALLAST_MB = 32
"""Room kept free of the sandbox's own doing, given back when it is graded: a full disk must not break the verifier."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_PROC_HIDDEN = ("kcore", "keys", "timer_list", "timer_stats", "latency_stats", "sched_debug")


@dataclass(slots=True)
class Init:
    """Process 1 of the sandbox. `waited` is the box's own child, which may be its parent."""

    pid: int
    waited: int
    holds: int = -1
    """A descriptor that must stay open as long as it lives."""
    ended: bool = False

    def alive(self) -> bool:
        """Whether the namespaces still take new processes."""
        return not self.ended

    def kill(self, reap: Callable[[], None]) -> None:
        """End it, and with it every process of its namespace, and wait for that.

        The kernel lets process 1 go only when every other one of its namespace is reaped, the caller's own children there too: `reap`.
        """
        if self.ended:
            return
        for pid in {self.pid, self.waited}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while any(not _is_zombie(pid) for pid in (self.pid, self.waited)) and time.monotonic() < until:
            reap()
            time.sleep(0.0005)
        reap()
        self.ended = True
        if self.holds >= 0:
            os.close(self.holds)
            self.holds = -1


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def mount_root(folder: Path, message: dict[str, Any]) -> str:
    """Mount the sandbox's root at `folder/root` and return that path.

    Layers must not lie inside one another on one file system (overlayfs refuses them), so the mask is made in memory and prepared
    layers are images of file systems.
    """
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    if message.get("disk_image"):
        mount_image(message["disk_image"], scratch)
    elif message.get("disk_tmpfs_mb"):
        kernel.mount("tmpfs", str(scratch), "tmpfs", kernel.MS_NODEV, f"size={message['disk_tmpfs_mb']}m")
    if message.get("disk_image") or message.get("disk_tmpfs_mb"):
        with open(scratch / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _BALLAST_MB << 20)
    private = folder / "private"
    private.mkdir(exist_ok=True)
    kernel.mount("tmpfs", str(private), "tmpfs", kernel.MS_NODEV | kernel.MS_NOSUID, f"size={_PRIVATE_MB}m,mode=755")
    upper, work, root = scratch / "upper", scratch / "work", folder / "root"
    for path in (upper, work, root):
        path.mkdir(exist_ok=True)
    os.chmod(upper, 0o755)
    lower = []
    for number, image in enumerate(message["layers"]):
        point = folder / f"layer-{number}"
        point.mkdir()
        mount_image(image, point, read_only=True)
        lower.append(str(point / "upper"))
    if message.get("mask"):
        lower.append(_make_mask(folder / "mask", message["mask"]))
    lower.append(message["base"])
    _write_etc(upper, message.get("etc", {}))
    options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work}"
    kernel.mount("overlay", str(root), "overlay", kernel.MS_NODEV, options)
    for path in message.get("folders", ()):
        _make_folder(root, path)
    for source, target in message.get("read_only", ()):
        _bind_into(root, source, target)
    return str(root)


def _make_folder(root: Path, path: str) -> None:
    """Make a folder of the sandbox. A link on the way would lead out, so it ends the walk: such a path is the image's own affair."""
    place = root
    for part in path.strip("/").split("/"):
        place = place / part
        if place.is_symlink():
            return
        if not place.exists():
            place.mkdir(mode=0o755)


def _make_mask(point: Path, mask: dict[str, Any]) -> str:
    """A layer, in memory, whose opaque folders and white-outs hide what lies below."""
    point.mkdir()
    kernel.mount("tmpfs", str(point), "tmpfs", kernel.MS_NODEV, "size=1m,mode=755")
    layer = point / "layer"  # an overlay layer must not be the root of what it lies on in some kernels
    layer.mkdir(mode=0o755)
    for name, mode, uid, gid, opaque in mask["emptied"]:
        path = layer / name
        path.mkdir(exist_ok=True)
        os.chown(path, uid, gid)
        path.chmod(mode)
        if opaque:
            os.setxattr(path, "trusted.overlay.opaque", b"y")
    for name in mask["hidden"]:
        os.mknod(layer / name, 0o020000, os.makedev(0, 0))
    return str(layer)


def _write_etc(upper: Path, files: dict[str, str]) -> None:
    """Files of /etc that every sandbox must have, straight into its top layer."""
    etc = upper / "etc"
    if files and not etc.exists():
        etc.mkdir(mode=0o755)
    for name, text in files.items():
        (etc / name).write_text(text)


def _bind_into(root: Path, source: str, target: str) -> None:
    place = Path(str(root) + target)
    if Path(source).is_dir():
        _make_folder(root, target)
    else:
        _make_folder(root, str(Path(target).parent))
        place.touch()
    if not place.resolve().is_relative_to(root):
        raise OSError(f"{target} leads out of the sandbox")
    kernel.bind(source, str(place), read_only=True)


def unmount_root(folder: Path) -> None:
    """Let go of the root's mounts, so that the folder under them can be removed."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        target = line.split()[1]
        if target.startswith(str(folder) + "/"):
            with contextlib.suppress(OSError):
                kernel.unmount(target)


def start(backend: str, root: str, *, network: str, spawn: Spawn) -> Init:
    """Start the init: 'bwrap' by bubblewrap, 'unshare' by the system calls themselves. `network`: 'own' or 'host'.

    `spawn` forks a child of ours, in the sandbox's control groups, that calls `become` with its message.
    """
    message = {"what": "init", "backend": backend, "root": root, "network": network}
    return _start_bwrap(message, spawn) if backend == "bwrap" else _start_unshare(message, spawn)


def become(message: dict[str, Any], fds: list[int]) -> None:
    """In the child: be the init, or its parent. Never returns."""
    try:
        if message["backend"] == "bwrap":
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            os.set_inheritable(fds[3], True)
            argv = _bwrap_argv(message["root"], message["network"], fds[3])
            os.execvpe(argv[0], argv, {"PATH": os.environ.get("PATH", "/usr/bin:/bin")})
        _make_namespaces(message["root"], message["network"], fds[0])
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


_BWRAP_INIT = """trap '' TERM INT HUP; echo up; exec >/dev/null 2>&1; while read -r line; do :; done"""
"""Reads a pipe that nobody writes to: no process of its own that could be killed. Bash, since it reaps orphans while it reads."""


def _bwrap_argv(root: str, network: str, status: int) -> list[str]:
    argv = ["bwrap", "--bind", root, "/", "--dev", "/dev", "--proc", "/proc"]
    argv += ["--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    argv += ["--perms", "1777", "--size", str(_SHM_MB << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    # bubblewrap leaves /proc/sys writable for root: it asks access(2), which says no for that folder
    for name in _PROC_READ_ONLY:
        argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _PROC_HIDDEN:
        if os.path.exists(f"/proc/{name}"):
            argv += ["--dev-bind", "/dev/null", f"/proc/{name}"]
    argv += ["--unshare-net"] if network == "own" else []
    argv += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1"]
    # A capability that nothing else in there has: so no process of the sandbox may trace its init.
    argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_NICE", "--json-status-fd", str(status)]
    return [*argv, "/bin/bash", "-c", _BWRAP_INIT]


def _start_bwrap(message: dict[str, Any], spawn: Spawn) -> Init:
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(4)]  # stdin, stdout, stderr, status
    (in_read, in_write), (out_read, out_write), (err_read, err_write), (status_read, status_write) = pipes
    handed = [in_read, out_write, err_write, status_write]
    pid = spawn(message, handed)
    for fd in handed:
        os.close(fd)
    with open(status_read) as status, open(out_read, "rb") as said, open(err_read, "rb") as complained:
        line = status.readline()  # a whole line: the JSON comes in pieces
        up = said.readline()  # the pid is told before the root is in place
        if not line or up != b"up\n":
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(in_write)
            problem = complained.read().decode(errors="replace").strip()
            raise OSError(f"bwrap did not start: {problem or 'no message'}")
    return Init(pid=json.loads(line)["child-pid"], waited=pid, holds=in_write)


def _start_unshare(message: dict[str, Any], spawn: Spawn) -> Init:
    told_read, told_write = os.pipe2(os.O_CLOEXEC)
    outer = spawn(message, [told_write])
    os.close(told_write)
    with open(told_read) as told:
        lines = [told.readline().strip(), told.readline().strip()]
    problem = next((line for line in lines if line.startswith("error") or not line), None)
    if problem is not None:
        os.kill(outer, signal.SIGKILL)
        os.waitpid(outer, 0)
        raise OSError(f"namespaces could not be made: {problem.removeprefix('error ') or 'the init ended'}")
    return Init(pid=int(next(line for line in lines if line != "up")), waited=outer)


def _make_namespaces(root: str, network: str, told: int) -> None:
    """Two processes: this one makes the namespaces and waits, the one it forks is process 1 in them. Never returns."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
        kernel.unshare(flags | (kernel.CLONE_NEWNET if network == "own" else 0))
        inner = os.fork()
        if inner == 0:
            _be_init(root, network, told)
        os.write(told, f"{inner}\n".encode())
        os.close(told)
        os.waitpid(inner, 0)
    except OSError as error:
        os.write(told, f"error {error}\n".encode())
    finally:
        os._exit(0)


def _be_init(root: str, network: str, told: int) -> None:
    """Process 1: build the root, drop everything, reap orphans until killed. Never returns."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        os.setsid()
        _furnish(root)
        kernel.pivot_root(root)
        if network == "own":
            kernel.loopback_up()
        kernel.libc.sethostname(b"sandbox", 7)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.write(told, b"up\n")
        os.closerange(3, 1024)
        kernel.keep_capabilities(("sys_nice",))
    except OSError as error:
        os.write(told, f"error {error}\n".encode())
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def _furnish(root: str) -> None:
    """/proc and /dev of a container: devices bound one by one, dangerous parts of /proc read-only or hidden."""
    kernel.bind(root, root)
    base = Path(root)
    for name in ("proc", "dev"):
        (base / name).mkdir(exist_ok=True)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", str(base / "proc"), "proc", safe)
    kernel.mount("tmpfs", str(base / "dev"), "tmpfs", kernel.MS_NOSUID, "mode=755,size=64m")
    for name in _DEVICES:
        (base / "dev" / name).touch()
        kernel.bind(f"/dev/{name}", str(base / "dev" / name))
    for name, mode in (("shm", 0o1777), ("pts", 0o755)):
        (base / "dev" / name).mkdir(mode=mode)
    kernel.mount(
        "tmpfs", str(base / "dev/shm"), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode=1777,size={_SHM_MB}m"
    )
    kernel.mount("devpts", str(base / "dev/pts"), "devpts", kernel.MS_NOSUID, "newinstance,ptmxmode=0666,mode=620")
    (base / "dev/ptmx").symlink_to("pts/ptmx")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (base / "dev" / name).symlink_to(target)
    kernel.mount(
        "none", str(base / "dev"), "none", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    )
    for name in _PROC_READ_ONLY:
        if (base / "proc" / name).exists():
            kernel.bind(str(base / "proc" / name), str(base / "proc" / name), read_only=True)
    for name in _PROC_HIDDEN:
        if (base / "proc" / name).exists():
            kernel.bind("/dev/null", str(base / "proc" / name))
