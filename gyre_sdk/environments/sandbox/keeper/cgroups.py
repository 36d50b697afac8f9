"""Limits through control groups, v1 or v2, whichever controls this machine's cpu, memory and pids."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

CONTROLLERS = ("cpu", "memory", "pids")
PREFIX = "gyre-"
_CPU_PERIOD_US = 100_000


def _mounts() -> list[tuple[str, str, set[str]]]:
    """(mount point, type, options) of every cgroup file system."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options = line.split()[:4]
        if kind in ("cgroup", "cgroup2"):
            found.append((target, kind, set(options.split(","))))
    return found


def _own_paths() -> dict[str, str]:
    """This process's group per v1 controller; key '' is v2."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    return own


def parents() -> dict[str, Path]:
    """Per controller the writable folder under which a sandbox's group can be made; missing ones can't limit."""
    found: dict[str, Path] = {}
    own = _own_paths()
    for target, kind, options in _mounts():
        if kind == "cgroup":
            for name in CONTROLLERS:
                if name in options:
                    base = Path(target + own.get(name, "/"))
                    found[name] = base if base.is_dir() else Path(target)
        else:
            for name in _unified(Path(target)):
                found.setdefault(name, Path(target) / "gyre")
    return {name: path for name, path in found.items() if os.access(path, os.W_OK)}


def _unified(root: Path) -> list[str]:
    """v2: make a `gyre` group below the root whose children may use the controllers. Empty when that isn't allowed."""
    try:
        available = (root / "cgroup.controllers").read_text().split()
        wanted = [name for name in CONTROLLERS if name in available]
        if not wanted:
            return []
        group = root / "gyre"
        group.mkdir(exist_ok=True)
        for folder in (root, group):
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    except OSError:
        return []
    return wanted


def create(name: str, *, cpus: float | None, memory_mb: int | None, pids: int | None) -> list[str]:
    """Make the groups of one sandbox with its limits; returns their folders. Raises OSError."""
    folders: dict[Path, None] = {}
    for controller, parent in parents().items():
        folder = parent / (PREFIX + name)
        folder.mkdir(exist_ok=True)
        folders[folder] = None
        unified = (folder / "cgroup.controllers").exists()
        for file, value in _settings(controller, unified, cpus=cpus, memory_mb=memory_mb, pids=pids):
            target = folder / file
            if target.exists():
                target.write_text(value)
    return [str(folder) for folder in folders]


def _settings(
    controller: str, unified: bool, *, cpus: float | None, memory_mb: int | None, pids: int | None
) -> list[tuple[str, str]]:
    if controller == "cpu" and cpus:
        quota = max(1000, int(cpus * _CPU_PERIOD_US))
        if unified:
            return [("cpu.max", f"{quota} {_CPU_PERIOD_US}")]
        return [("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    if controller == "memory" and memory_mb:
        size = str(memory_mb << 20)
        if unified:
            return [("memory.max", size), ("memory.swap.max", "0")]
        return [("memory.limit_in_bytes", size), ("memory.memsw.limit_in_bytes", size)]
    if controller == "pids" and pids:
        return [("pids.max", str(pids))]
    return []


def join(folders: list[str]) -> None:
    """Put the calling process into the groups."""
    for folder in folders:
        fd = os.open(folder + "/cgroup.procs", os.O_WRONLY)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)


def remove(folders: list[str], *, patience_s: float = 2.0) -> list[str]:
    """Kill what is left in the groups and remove them; returns those that could not be removed."""
    left = []
    for folder in folders:
        until = time.monotonic() + patience_s
        while Path(folder).exists():
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
                break
            with contextlib.suppress(OSError, ValueError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > until:
                left.append(folder)
                break
            time.sleep(0.005)
    return left
