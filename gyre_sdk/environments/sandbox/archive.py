"""Moving files in and out as tar streams, with nothing from inside trusted."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gyre_sdk.errors import SandboxError

_PADDING_BYTES = 1 << 20
"""How much is read behind an archive's end mark, at most."""


def pack(source: Path, fd: int, *, name: str | None) -> None:
    """Write `source` to `fd` as tar and close it: a file under `name`, a folder's contents by their own names."""
    try:
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            if source.is_dir():
                for entry in sorted(source.iterdir()):
                    archive.add(entry, arcname=entry.name, filter=_as_root)
            else:
                archive.add(source.resolve(), arcname=name or source.name, filter=_as_root)
    except BrokenPipeError:
        pass  # the other side tells what went wrong


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(fd: int, target: Path, *, single: bool, limit_mb: int) -> None:
    """Read a tar stream and close it. `single`: its one member becomes `target` itself. Raises SandboxError."""
    left = limit_mb << 20
    try:
        with os.fdopen(fd, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in _members(archive, file):
                left -= member.size
                if left < 0:
                    raise SandboxError(f"what was asked for is larger than {limit_mb} MiB")
                if single:
                    _write_single(archive, member, target)
                    continue
                try:
                    archive.extract(member, target, filter="data", set_attrs=True)
                except tarfile.FilterError:
                    continue  # a link out of the folder, an absolute name: left behind, never followed
                except OSError:
                    continue  # a name this file system can't take
    except tarfile.TarError as error:
        if not single and "empty" in str(error):
            return
        raise SandboxError(f"the sandbox's answer is no archive: {error}") from error


def _members(archive: tarfile.TarFile, file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """The members, then the padding behind the end mark: a writer whose pipe closes before that dies of SIGPIPE."""
    yield from archive
    for _ in range(_PADDING_BYTES // 65536):
        if not file.read(65536):
            return


def _write_single(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = archive.extractfile(member) if member.isreg() else None
    if content is None:
        raise SandboxError(f"{member.name} is not a regular file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        shutil.copyfileobj(content, out)


def read_regular(path: Path, *, limit: int = 1 << 20) -> bytes | None:
    """The content of a small regular file that untrusted code may have written: no links, no devices, bounded. None if it isn't one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        data = file.read(limit + 1)
    return data if len(data) <= limit else None
