"""Linux calls that Python's standard library lacks: namespaces, mounts, capabilities, seccomp. All raise OSError."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = 0o2000000
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

CAPABILITIES = {
    "chown": 0, "dac_override": 1, "fowner": 3, "fsetid": 4, "kill": 5, "setgid": 6, "setuid": 7, "setpcap": 8,
    "net_bind_service": 10, "net_raw": 13, "sys_chroot": 18, "sys_nice": 23, "audit_write": 29, "setfcap": 31,
}  # fmt: skip
"""What root keeps inside a sandbox: a container's usual set without mknod, plus sys_nice, which only verifiers get."""
LAST_CAPABILITY = 40

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int = 0) -> None:
    """setns(2)."""
    _check(libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() if data else None
    )
    _check(result, f"mount {kind} on {target}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Bind `source`, with what is mounted under it, on `target`."""
    mount(source, target, "none", MS_BIND | MS_REC)
    if read_only:
        mount("none", target, "none", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def unmount(target: str) -> None:
    """Lazy umount2(2)."""
    _check(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str) -> None:
    """Make `new` the root of this mount namespace and let go of the old one."""
    number = _SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: not known for {platform.machine()}")
    os.chdir(new)
    _check(libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def clone_tree(path: str) -> int:
    """A detached copy of the mount at `path`, as a file descriptor that can be attached in another namespace."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    call = libc.syscall(ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_uint(flags))
    return _check(call, f"open_tree {path}")


def attach_tree(tree: int, target: str, *, read_only: bool) -> None:
    """Attach what `clone_tree` gave on `target` of the present mount namespace."""
    if read_only:
        attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
        call = libc.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(tree),
            b"",
            ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE),
            attributes,
            ctypes.c_size_t(len(attributes)),
        )
        _check(call, f"mount_setattr {target}")
    call = libc.syscall(
        ctypes.c_long(_SYS_MOVE_MOUNT),
        ctypes.c_int(tree),
        b"",
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )
    _check(call, f"move_mount {target}")


def die_with_parent(signal: int) -> None:
    """Ask for `signal` when the thread that forked this process ends."""
    _check(libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal), 0, 0, 0), "prctl")


def no_new_privileges() -> None:
    """Set-uid programs and file capabilities give nothing from here on."""
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def keep_capabilities(names: Iterable[str]) -> None:
    """Drop every capability but `names`, for this process and whatever it executes."""
    numbers = {CAPABILITIES[name] for name in names}
    for number in range(LAST_CAPABILITY + 1):
        if number not in numbers:
            libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)  # EINVAL above the kernel's last one
    mask = sum(1 << number for number in numbers)
    header = struct.pack("Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("IIIIII", low, low, 0, high, high, 0)
    _check(libc.capset(header, data), "capset")


def loopback_up() -> None:
    """Bring `lo` up in the present network namespace."""
    siocgifflags, siocsifflags, iff_up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, siocgifflags, request))
        fcntl.ioctl(control, siocsifflags, struct.pack("16sh14x", b"lo", flags | iff_up))
