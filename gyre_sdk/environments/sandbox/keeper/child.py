"""What a box's child does: enter the sandbox, drop privileges, then execute a command or move files. Never returns."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import stat
import sys
import tarfile
from dataclasses import dataclass
from typing import Any

from . import cgroups, channel, kernel, scrub, seccomp

ROOT_CAPABILITIES = tuple(name for name in kernel.CAPABILITIES if name not in ("sys_nice", "net_raw"))
_FAILED = 126
_NOT_FOUND = 127


@dataclass(slots=True)
class Namespaces:
    """Open descriptors of a sandbox's namespaces. `net` is -1 when it shares the host's network."""

    mnt: int
    pid: int
    ipc: int
    uts: int
    net: int = -1

    @classmethod
    def of(cls, pid: int, *, own_network: bool) -> Namespaces:
        """Those of a running init."""
        opened = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("mnt", "pid", "ipc", "uts")}
        return cls(**opened, net=os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) if own_network else -1)

    def descriptors(self) -> list[int]:
        """All of them, in the order of the fields."""
        return [self.mnt, self.pid, self.ipc, self.uts, *([self.net] if self.net >= 0 else [])]

    def enter(self) -> None:
        """Move the calling process in; root and working directory become the sandbox's."""
        for fd in (self.ipc, self.uts, self.net, self.mnt):
            if fd >= 0:
                kernel.setns(fd)

    def close(self) -> None:
        """Let go of all of them."""
        for fd in (self.mnt, self.pid, self.ipc, self.uts, self.net):
            if fd >= 0:
                os.close(fd)


def run_child(
    message: dict[str, Any],
    fds: list[int],
    namespaces: Namespaces,
    groups: list[str],
    trees: list[tuple[int, str, bool]],
    connection: socket.socket,
) -> None:
    """Do what `message['what']` says, after joining `groups`. The exit code is the answer; words for people go to the request's stderr."""
    code = _FAILED
    error_fd = fds[-1] if fds else 2
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        cgroups.join(groups)
        planted = scrub.find(message["upper"], message["base"]) if message["what"] == "scrub" else []
        if not message.get("outside"):
            namespaces.enter()
        if trees:
            _attach(trees)
        if message["what"] == "listen":
            _listen(message, connection)
        elif message["what"] == "exec":
            _execute(message, fds)
        elif message["what"] == "scrub":
            _drop(message, root=True)
            os.write(fds[0], "".join(f"{path}\n" for path in planted if _remove_planted(path)).encode())
        elif message["what"] == "put":
            _drop(message, root=True)
            _put(message, fds[0])
        elif message["what"] == "get":
            _drop(message, root=True)
            _get(message, fds[0])
        code = 0
    except FileNotFoundError as error:
        code = _NOT_FOUND
        os.write(error_fd, f"sandbox: {error}\n".encode())
    except (OSError, ValueError, KeyError, tarfile.TarError) as error:
        os.write(error_fd, f"sandbox: {error}\n".encode())
    finally:
        os._exit(code)


def _attach(trees: list[tuple[int, str, bool]]) -> None:
    """Mounts that only this command and its children see."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    for tree, target, read_only in trees:
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            _real_folder(target)
        else:
            _real_folder(os.path.dirname(target))
            if not os.path.isfile(target) or os.path.islink(target):
                _empty(target)
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644))
        kernel.attach_tree(tree, target, read_only=read_only)


def _real_folder(target: str) -> None:
    """Make `target` a folder reached through no symbolic link, whatever was planted on the way."""
    path = ""
    for part in target.strip("/").split("/"):
        path += "/" + part
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            os.unlink(path)
        if not os.path.lexists(path):
            os.mkdir(path, 0o755)


def _listen(message: dict[str, Any], connection: socket.socket) -> None:
    """Open a loopback port in the sandbox's network and hand the listening socket to the runner."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", message.get("port", 0)))
        listener.listen(128)
        channel.send(connection, {"id": message["reply"], "port": listener.getsockname()[1]}, [listener.fileno()])


def _lookup(user: str | int | None) -> tuple[int, int, list[int], str]:
    """uid, gid, supplementary groups and home of a user, from the sandbox's own files (no name service, no libraries)."""
    name = str(user if user is not None else 0)
    uid, gid, home, found = 0, 0, "/root", name in ("0", "root")
    with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.rstrip("\n").split(":")
            if len(fields) >= 6 and name in (fields[0], fields[2]):
                name, uid, gid, home, found = fields[0], int(fields[2]), int(fields[3]), fields[5], True
                break
    if not found:
        if not name.isdigit():
            raise KeyError(f"no user {name!r} in the sandbox")
        uid = gid = int(name)
        home = "/"
    groups = [gid]
    if os.path.exists("/etc/group"):
        with open("/etc/group", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if len(fields) >= 4 and name in fields[3].split(","):
                    groups.append(int(fields[2]))
    return uid, gid, groups, home


def _drop(message: dict[str, Any], *, root: bool = False) -> str:
    """Give up everything the command must not have; returns the user's home folder."""
    uid, gid, groups, home = (0, 0, [0], "/root") if root else _lookup(message.get("user"))
    capabilities = [*ROOT_CAPABILITIES, *message.get("capabilities", ())]
    if message.get("file_size_mb"):
        limit = message["file_size_mb"] << 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seccomp.install()
    os.setgroups(groups)
    kernel.keep_capabilities(capabilities)
    os.setgid(gid)
    os.setuid(uid)
    return home


def _execute(message: dict[str, Any], fds: list[int]) -> None:
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    home = _drop(message)
    environment = {"HOME": home, **message["env"]}
    os.chdir(message["cwd"])
    os.umask(0o022)
    argv = message["argv"]
    os.execvpe(argv[0], argv, environment)


def _put(message: dict[str, Any], fd: int) -> None:
    """Unpack a tar stream under `target`. `fresh`: what was there is removed first, links not followed."""
    target = message["target"]
    if message.get("fresh"):
        _empty(target)
    if os.path.islink(target) and not os.path.isdir(target):
        os.unlink(target)
    os.makedirs(target, exist_ok=True)
    with os.fdopen(fd, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            member.uname = member.gname = ""
            place = os.path.join(target, member.name)
            if os.path.islink(place) and not member.isdir():
                os.unlink(place)  # a link planted where the file belongs is replaced, not followed
            archive.extract(member, target, numeric_owner=True, filter="fully_trusted")


def _empty(path: str) -> None:
    """Remove what lies at `path`, or in it when it is a folder."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _remove_planted(path: str) -> bool:
    """Remove a file or folder through the sandbox's own view; links on the way are not followed (the finder saw none)."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError:
        return False
    return True


def _get(message: dict[str, Any], fd: int) -> None:
    """Pack `source` as a tar stream; a folder's members are relative to it, a file is one member."""
    source = message["source"]
    if not os.path.lexists(source):
        raise FileNotFoundError(f"no such file: {source}")
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w|") as archive:
        if os.path.isdir(source):
            for name in sorted(os.listdir(source)):
                archive.add(os.path.join(source, name), arcname=name, filter=_plain)
        else:
            archive.add(os.path.realpath(source), arcname=os.path.basename(source), filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Only files, folders and links travel."""
    member.uname = member.gname = ""
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]  # names would load libraries of the sandbox
sys.dont_write_bytecode = True
