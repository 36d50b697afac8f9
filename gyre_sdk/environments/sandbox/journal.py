"""What a runner leaves on disk before it starts a sandbox, and the sweep that removes what a killed runner left."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_sdk.environments.sandbox.keeper import cgroups

_FILE = "journal.json"
_YOUNG_S = 60.0


def home() -> Path:
    """The folder of all sandboxes of this user: $GYRE_SANDBOXES, or one in the temporary folder. Private to the user."""
    named = os.environ.get("GYRE_SANDBOXES")
    path = Path(named) if named else Path(tempfile.gettempdir()) / f"gyre-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set GYRE_SANDBOXES to a folder of yours")
    return path.resolve()


def prefix() -> str:
    """What the names of this home's sandboxes begin with: a sweep of one home never takes another's for leftovers."""
    return f"box-{os.getuid()}-{hashlib.sha256(str(home()).encode()).hexdigest()[:6]}-"


def start_time(pid: int) -> int | None:
    """When a live process started, in clock ticks since boot; tells a process from a later one with the same id."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def boot_id() -> str:
    """Changes with every boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def open_entry(name: str, backend: str) -> Path:
    """Make a sandbox's folder and write, before anything is started, whose it is. Returns the folder."""
    folder = home() / "boxes" / name
    folder.mkdir(parents=True, mode=0o700)
    entry = {"backend": backend, "boot": boot_id(), "pids": {str(os.getpid()): start_time(os.getpid())}}
    _write(folder, entry | {"owner": os.getpid()})
    return folder


def add_facts(folder: Path, *, pids: list[int], groups: list[str]) -> None:
    """Add what was started. The entry was there before, so a crash in between is still swept."""
    with contextlib.suppress(FileNotFoundError):
        entry = json.loads((folder / _FILE).read_text())
        entry["pids"] |= {str(pid): start_time(pid) for pid in pids}
        _write(folder, entry | {"groups": groups})


def name_container(folder: Path, container: list[str]) -> None:
    """Note, before it is started, the engine and the name of the container to remove."""
    entry = json.loads((folder / _FILE).read_text())
    _write(folder, entry | {"container": container})


def forget(folder: Path) -> None:
    """Remove an entry's folder once all it names is gone."""
    shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, entry: dict[str, Any]) -> None:
    temporary = folder / (_FILE + ".new")
    # Not forced to disk: a killed runner leaves its writes, and after a crash of the machine nothing that they name is left.
    temporary.write_text(json.dumps(entry))
    temporary.replace(folder / _FILE)


@dataclass(slots=True)
class Swept:
    """What a sweep removed, and what it could not remove."""

    boxes: list[str] = field(default_factory=list)
    processes: int = 0
    groups: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def sweep() -> Swept:
    """Remove what dead runners left: processes, control groups, folders. Live runners' sandboxes are not touched."""
    swept = Swept()
    root = home()
    with _lock(root / "sweep.lock"):
        for folder in sorted((root / "boxes").glob("*")):
            _sweep_box(folder, swept)
        _sweep_groups(root, swept)
    return swept


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep_box(folder: Path, swept: Swept) -> None:
    try:
        entry = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _YOUNG_S:
                return  # being made right now
        entry = {"boot": "", "pids": {}, "owner": 0}
    same_boot = entry["boot"] == boot_id()
    owner = str(entry["owner"])
    if same_boot and entry["pids"].get(owner) is not None and start_time(int(owner)) == entry["pids"][owner]:
        return
    if same_boot:
        for pid, started in entry["pids"].items():
            if pid != owner and started is not None and start_time(int(pid)) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
                    swept.processes += 1
        swept.groups += entry.get("groups", [])
        swept.left += cgroups.remove(entry.get("groups", []))
    if entry.get("container"):
        _remove_container(entry["container"])
    shutil.rmtree(folder, ignore_errors=True)
    swept.boxes.append(folder.name)
    if folder.exists():
        swept.left.append(str(folder))


def _sweep_groups(root: Path, swept: Swept) -> None:
    """Control groups of a box whose folder is already gone (killed between the two removals)."""
    for parent in set(cgroups.parents().values()):
        for folder in parent.glob(cgroups.PREFIX + prefix() + "*"):
            name = folder.name.removeprefix(cgroups.PREFIX)
            if not (
                root / "boxes" / name
            ).exists():  # the folder is made before the group, so this can't be a starting one
                swept.groups.append(str(folder))
                swept.left += cgroups.remove([str(folder)])


def _remove_container(container: list[str]) -> None:
    import subprocess

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([container[0], "rm", "-f", container[1]], capture_output=True, timeout=60, check=False)
