"""Room for what a sandbox writes: a file system image of the limit's size where loop devices work, else memory of that size."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from gyre_sdk.environments.sandbox.journal import home

_MOST_MB = 1 << 20
_BALLAST_MB = 32
"""As in the keeper: room that is given back when the sandbox is graded."""


async def scratch(folder: Path, disk_mb: int | None) -> dict[str, str | int]:
    """What the keeper must mount as scratch space for a limit; {} when the box's own folder will do."""
    if disk_mb is None:
        return {}
    return await asyncio.to_thread(_scratch, folder, min(disk_mb, _MOST_MB))


def _scratch(folder: Path, disk_mb: int) -> dict[str, str | int]:
    if loop_works():
        image = folder / "disk.img"
        _copy_sparse(_template(disk_mb), image)
        return {"disk_image": str(image)}
    return {"disk_tmpfs_mb": disk_mb + _BALLAST_MB}


@cache
def loop_works() -> bool:
    """Whether an image of a file system can be made and mounted here. Tried once."""
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        return False
    try:
        image = _template(64)
        point = home() / f"probe-{os.getpid()}"
        point.mkdir(exist_ok=True)
        try:
            subprocess.run(
                ["mount", "-o", "loop,ro", str(image), str(point)], check=True, capture_output=True, timeout=20
            )
            subprocess.run(["umount", str(point)], check=True, capture_output=True, timeout=20)
        finally:
            with contextlib.suppress(OSError):
                point.rmdir()
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _template(disk_mb: int) -> Path:
    """An empty ext4 image, sparse, made once per size. Its size is the limit and what ext4 itself needs."""
    images = home() / "images"
    images.mkdir(mode=0o700, exist_ok=True)
    final = images / f"ext4-{disk_mb}-b{_BALLAST_MB}.img"
    if final.exists():
        return final
    # A name of its own for every maker: two threads of one process may be here at once.
    handle, name = tempfile.mkstemp(prefix=f".ext4-{disk_mb}-", suffix=".img", dir=images)
    try:
        with os.fdopen(handle, "wb") as file:
            file.truncate((disk_mb + _BALLAST_MB + max(8, disk_mb // 32)) << 20)
        options = ["-b", "4096", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=1,nodiscard"]
        subprocess.run(["mkfs.ext4", "-q", "-F", *options, name], check=True, capture_output=True, timeout=120)
        Path(name).rename(final)
    except BaseException:  # cleans up and raises again
        Path(name).unlink()
        raise
    return final


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy only what was written."""
    with source.open("rb") as read, target.open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        write.truncate(size)
        offset = 0
        while offset < size:
            try:
                start = os.lseek(read.fileno(), offset, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(read.fileno(), start, os.SEEK_HOLE)
            os.lseek(write.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(write.fileno(), read.fileno(), start, end - start)
            offset = end
