"""Finding and ending processes of a sandbox, seen from the host's /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_ROUNDS = 50


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, session) of a live process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[3]))


def _all() -> dict[int, tuple[int, int]]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            found[int(name)] = stat
    return found


def children_of(parent: int) -> set[int]:
    """Live processes whose parent it is."""
    return {pid for pid, (ppid, _) in _all().items() if ppid == parent}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_tree(root: int) -> None:
    """End `root`, its descendants and its session: stop all first, so that none can fork away, then kill."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        table = _all()
        members = _closure(table, {root} | stopped)
        members |= {pid for pid, (_, session) in table.items() if session == root}
        fresh = members - stopped
        if not fresh:
            break
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped | {root}:
        _signal(pid, signal.SIGKILL)


def _closure(table: dict[int, tuple[int, int]], roots: set[int]) -> set[int]:
    """`roots` that live, and all that descend from them."""
    members = roots & table.keys()
    grew = True
    while grew:
        more = {pid for pid, (parent, _) in table.items() if parent in members} - members
        members |= more
        grew = bool(more)
    return members


def _namespace(pid: int, kind: str = "pid") -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    return ""


def kill_private(init: int) -> None:
    """End every process of the sandbox with a mount namespace of its own: what a command with private mounts left behind."""
    shared = _namespace(init, "mnt")
    for _ in range(_ROUNDS):
        strays = [pid for pid in _inside(init) if _namespace(pid, "mnt") not in ("", shared)]
        if not strays:
            return
        for pid in strays:
            _signal(pid, signal.SIGKILL)


def _inside(init: int) -> set[int]:
    wanted = _namespace(init)
    return {pid for pid in _all() if pid != init and wanted and _namespace(pid) == wanted}


def _listening_inodes(init: int) -> set[str]:
    """Inodes of the sockets that accept connections in the network of `init`."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{init}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found.add(fields[9])
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{init}/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[3], 16) & 0x10000:
                found.add(fields[6])
    return found


def _listens(pid: int, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    return True
    return False


def kill_all_but_listeners(init: int) -> list[str]:
    """End everything in the sandbox of `init` but services: processes with a listening socket, and their descendants.

    Returns the services' command names.
    """
    kept: set[int] = set()
    for _ in range(_ROUNDS):
        inside, inodes = _inside(init), _listening_inodes(init)
        services = {pid for pid in inside if _listens(pid, inodes)}
        kept = _closure(_all(), services) & inside
        doomed = inside - kept
        if not doomed:
            break
        for pid in doomed:
            _signal(pid, signal.SIGKILL)
    names = []
    for pid in sorted(kept):
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return names
