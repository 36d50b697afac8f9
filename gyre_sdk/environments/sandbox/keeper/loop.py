"""File system images as mounts, without calling mount(8): about 10 ms less for every sandbox."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

from . import kernel

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
_MAJOR = 7
_TRIES = 32


def _configure(image: int, *, read_only: bool) -> str:
    """Attach an open image to a free loop device that frees itself with its last user. Returns the device's path, still held open."""
    flags = _AUTOCLEAR | (_READ_ONLY if read_only else 0)
    info = struct.pack("5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, b"gyre", b"", b"", 0, 0)
    for _ in range(_TRIES):
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        finally:
            os.close(control)
        path = f"/dev/loop{number}"
        if not os.path.exists(path):
            with contextlib.suppress(FileExistsError):
                os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(_MAJOR, number))
        device = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _LOOP_CONFIGURE, struct.pack("II", image, 4096) + info + bytes(64))
        except OSError as error:
            os.close(device)
            if error.errno == errno.EBUSY:
                continue  # another process took it first
            raise
        return f"{device}:{path}"
    raise OSError(errno.EBUSY, "no free loop device")


def mount_image(image: str, point: Path, *, read_only: bool = False) -> None:
    """Mount an ext4 image. Raises OSError."""
    file = os.open(image, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    try:
        held, _, path = _configure(file, read_only=read_only).partition(":")
    finally:
        os.close(file)
    try:
        flags = kernel.MS_NODEV | (kernel.MS_RDONLY if read_only else 0)
        kernel.mount(path, str(point), "ext4", flags, "noload" if read_only else "noinit_itable")
    finally:
        os.close(int(held))
