"""A small system-call filter: no new user namespaces, no mounts, no kernel modules, keys, bpf or tracing of the kernel."""

from __future__ import annotations

import ctypes
import platform
import struct

from .kernel import CLONE_NEWUSER, libc

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_EPERM = 0x00050000 | 1
_ENOSYS = 0x00050000 | 38
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARG0 = 0, 4, 16

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {  # name: (x86_64, aarch64)
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "acct": (163, 89),
    "quotactl": (179, 60), "lookup_dcookie": (212, 18),
}  # fmt: skip
_UNSHARE = (272, 97)
_CLONE = (56, 220)
_CLONE3 = 435


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def program() -> bytes:
    """The filter for this machine's architecture; empty where it is not known."""
    machine = platform.machine()
    if machine not in _ARCHES:
        return b""
    column = 0 if machine == "x86_64" else 1
    deny = _step(_RET, _EPERM)
    steps = [_step(_LD, _ARCH), _step(_JEQ, _ARCHES[machine], 1, 0), deny, _step(_LD, _NUMBER)]
    if machine == "x86_64":
        steps += [_step(_JGE, 0x40000000, 0, 1), deny]  # the x32 numbers would pass every check below
    for numbers in _DENIED.values():
        steps += [_step(_JEQ, numbers[column], 0, 1), deny]
    steps += [
        _step(_JEQ, _CLONE3, 0, 1),
        _step(_RET, _ENOSYS),
    ]  # its flags are behind a pointer; libraries fall back to clone
    for number in (_UNSHARE[column], _CLONE[column]):
        steps += [
            _step(_JEQ, number, 0, 4),
            _step(_LD, _ARG0),
            _step(_JSET, CLONE_NEWUSER, 0, 1),
            deny,
            _step(_RET, _ALLOW),
        ]
    steps.append(_step(_RET, _ALLOW))
    return b"".join(steps)


_PROGRAM = program()


def install() -> None:
    """Filter the calling process and all it executes. Needs CAP_SYS_ADMIN, which is dropped only afterwards."""
    if not _PROGRAM:
        return
    buffer = ctypes.create_string_buffer(_PROGRAM, len(_PROGRAM))
    header = struct.pack("HxxxxxxP", len(_PROGRAM) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filter refused")
