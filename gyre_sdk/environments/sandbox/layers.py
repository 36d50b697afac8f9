"""What of the host's root a sandbox must not see: homes, work and data folders, other people's logs and sockets."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from gyre_sdk.environments.sandbox.journal import home

_SYSTEM = frozenset(
    [
        "bin",
        "boot",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "opt",
        "proc",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "var",
        "nix",
    ]
)
"""Top-level names that are part of an operating system. Everything else belongs to people or data, and is hidden."""
_EMPTIED = {"root": 0o711, "home": 0o755, "tmp": 0o1777, "run": 0o755, "mnt": 0o755, "media": 0o755, "srv": 0o755, "var/tmp": 0o1777,
            "var/mail": 0o2775, "var/spool/cron": 0o755, "var/log": 0o755, "var/backups": 0o755}  # fmt: skip


@cache
def mask(masks: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mask as data for the keeper: `hidden` names of `/`, and `emptied` folders as (path, mode, uid, gid, opaque)."""
    hidden = sorted(
        entry.name
        for entry in os.scandir("/")
        if entry.name not in _SYSTEM and entry.name not in _EMPTIED and not entry.is_symlink()
    )
    wanted = dict(_EMPTIED)
    for name in (*masks, str(home())):
        if not any(Path(name).is_relative_to("/" + top) for top in (*_EMPTIED, *hidden)):
            wanted[name.strip("/")] = 0o700
    folders: dict[str, tuple[str, int, int, int, bool]] = {}
    for name, mode in wanted.items():
        path = Path("/", name)
        if not path.is_dir() or path.is_symlink():
            continue
        for parent in reversed(Path(name).parents[:-1]):
            stat = Path("/", parent).stat()
            folders.setdefault(str(parent), (str(parent), stat.st_mode & 0o7777, stat.st_uid, stat.st_gid, False))
        folders[name] = (name, mode, path.stat().st_uid if name != "home" else 0, path.stat().st_gid, True)
    for entry in os.scandir("/var/log") if "var/log" in folders else ():
        if entry.is_dir(follow_symlinks=False):  # services want their folder there, and nobody else's logs
            stat = entry.stat(follow_symlinks=False)
            folders[f"var/log/{entry.name}"] = (
                f"var/log/{entry.name}",
                stat.st_mode & 0o7777,
                stat.st_uid,
                stat.st_gid,
                False,
            )
    return {"hidden": hidden, "emptied": list(folders.values())}


@cache
def submounts() -> tuple[str, ...]:
    """System folders of the host on file systems of their own: an overlay of `/` doesn't show them, so they are bound."""
    found = set()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind = line.split()[:3]
        top = target.strip("/").split("/")[0]
        system = top in _SYSTEM - {"dev", "proc", "run", "sys", "tmp", "boot"}
        if system and kind not in ("tmpfs", "overlay", "proc", "sysfs", "autofs") and target.strip("/") not in _EMPTIED:
            found.add(target)
    return tuple(sorted(found))
