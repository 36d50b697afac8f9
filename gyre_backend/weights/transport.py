"""How bytes get from one cell's memory to another's: a protocol, and the `file` transport that works
everywhere.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_backend.errors import WeightsError
from gyre_backend.weights.regions import Region
from gyre_sdk.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Copy `nbytes` from `remote` (address or offset at the source) to `local` (address here)."""

    remote: int
    local: int
    nbytes: int


class Transport(Protocol):
    """Moves ranges of memory. `read` may be called from any thread but the event loop's: it blocks."""

    @property
    def name(self) -> str:
        """mooncake | file: what a manifest says, so that both sides agree."""
        ...

    def expose(self, regions: Sequence[Region], version: int) -> tuple[str, list[int]]:
        """Make regions readable: (session, the `ptr` that a reader uses for each region)."""
        ...

    def withdraw(self, session: str, regions: Sequence[Region]) -> None:
        """No more reads of them are served; their memory may go away."""
        ...

    def read(self, session: str, ranges: Sequence[ReadRange], target: Region, deadline_s: float) -> None:
        """Fill parts of `target`. Raises WeightsError; `target` may then be half written, even later: drop
        it.
        """
        ...

    def close(self) -> None:
        """Withdraw everything."""
        ...


class FileTransport:
    """Snapshots through a folder that both sides see: for a machine without Mooncake, or cells that share
    only a disk.
    """

    name = "file"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: set[Path] = set()
        self._numbers = itertools.count(1)

    def expose(self, regions: Sequence[Region], version: int) -> tuple[str, list[int]]:
        """Write the regions one after the other into a new file, which appears under its name only when
        complete.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"snapshot-{os.getpid()}-{next(self._numbers):06d}-v{version}.bin"
        temporary = path.with_suffix(".tmp")
        offsets, offset = [], 0
        try:
            with temporary.open("wb") as file:
                for region in regions:
                    offsets.append(offset)
                    file.write(region.view.data)
                    offset += region.nbytes
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise WeightsError(f"the snapshot can't be written to {self.folder}: {error.strerror}") from error
        self._files.add(path)
        return str(path), offsets

    def withdraw(self, session: str, regions: Sequence[Region]) -> None:
        """Remove the file; a reader that has it open reads on."""
        path = Path(session)
        if path in self._files:
            self._files.discard(path)
            path.unlink(missing_ok=True)

    def read(self, session: str, ranges: Sequence[ReadRange], target: Region, deadline_s: float) -> None:
        """Read ranges of the file into `target`."""
        for part in ranges:
            check_inside(part, target)
        in_thread(lambda: self._read(session, ranges), deadline_s, f"the read of {session}")

    def _read(self, session: str, ranges: Sequence[ReadRange]) -> None:
        try:
            with Path(session).open("rb", buffering=0) as file:
                for part in ranges:
                    file.seek(part.remote)
                    view = memoryview((ctypes.c_uint8 * part.nbytes).from_address(part.local)).cast("B")
                    done = 0
                    while done < part.nbytes:
                        count = file.readinto(view[done:])
                        if not count:
                            raise WeightsError(f"{session} ends before offset {part.remote + part.nbytes}")
                        done += count
        except OSError as error:
            raise WeightsError(f"{session} can't be read: {error.strerror}") from error

    def close(self) -> None:
        """Remove every file that is still there."""
        for path in list(self._files):
            self.withdraw(str(path), [])


def check_inside(part: ReadRange, target: Region) -> None:
    """A range that would write outside `target` is refused before any byte moves: not every transport
    checks.
    """
    if part.nbytes <= 0 or part.local < target.ptr or part.local + part.nbytes > target.ptr + target.nbytes:
        raise WeightsError(f"a read of {part.nbytes} bytes does not fit into {target.name}")


def in_thread(work: Callable[[], None], deadline_s: float, what: str) -> None:
    """Run blocking `work` in a thread of its own; WeightsError when it is not back after `deadline_s` (the
    thread is abandoned).
    """
    failure: list[WeightsError] = []

    def body() -> None:
        try:
            work()
        except WeightsError as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="gyre-transfer", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        raise WeightsError(f"{what} was not back after {deadline_s:g} s and is abandoned")
    if failure:
        raise failure[0]


def make_transport(
    kind: str, *, folder: Path, host: str = "127.0.0.1", protocol: str = "tcp", device: str = ""
) -> Transport:
    """`mooncake`, `file`, or `auto` (Mooncake when it is installed and starts, else file)."""
    if kind == "file":
        return FileTransport(folder)
    from gyre_backend.weights.mooncake import MooncakeTransport

    try:
        return MooncakeTransport(host, protocol=protocol, device=device)
    except (MissingExtraError, WeightsError):
        if kind == "mooncake":
            raise
        return FileTransport(folder)
