"""Cells as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_backend.errors import CellError

_LAST_WORDS = 300


class LocalCell:
    """One cell process, its session and its log."""

    def __init__(self, process: asyncio.subprocess.Process, ready: CellReady, log: Path) -> None:
        self._process = process
        self._ready = ready
        self.log = log
        self._ended = False

    @property
    def ready(self) -> CellReady:
        """What the cell said when it came up."""
        return self._ready

    async def wait(self) -> str:
        """Until the process has ended; says how."""
        code = await self._process.wait()
        self._end_session()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}; its log is {self.log}"

    async def kill(self) -> None:
        """SIGKILL to the cell's whole session (an SGLang server that it launched included)."""
        self._end_session()
        await self._process.wait()

    def _end_session(self) -> None:
        """Once: after that the number may belong to someone else."""
        if not self._ended:
            self._ended = True
            _kill_session(self._process)

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM and end of stdin, then SIGKILL."""
        if self._process.returncode is None:
            self._process.terminate()
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await self.kill()


class LocalRuntime:
    """A process per cell, supervised by whoever awaits `CellHandle.wait`."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._cells: list[LocalCell] = []

    async def start(self, spec: CellSpec, timeout_s: float) -> LocalCell:
        """Start `python -m gyre_backend.cells.worker` and wait for its ready line."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{spec.name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gyre_backend.cells.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **spec.env},
                start_new_session=True,
                limit=1 << 20,
            )
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            await process.stdin.drain()
            ready = await asyncio.wait_for(read_ready(process), timeout_s)
        except BaseException as error:
            _kill_session(process)
            await asyncio.shield(process.wait())
            if isinstance(error, TimeoutError):
                raise CellError(f"cell {spec.name} was not ready after {timeout_s:g} s; its log is {log}") from error
            if isinstance(error, (CellError, ConnectionError, BrokenPipeError)):
                raise CellError(f"cell {spec.name} did not come up: {last_words(log)}") from error
            raise
        cell = LocalCell(process, ready, log)
        self._cells = [c for c in self._cells if c._process.returncode is None] + [cell]
        return cell

    async def aclose(self) -> None:
        """Stop every cell that is still there, all at once."""
        cells, self._cells = self._cells, []
        await asyncio.gather(*(cell.stop() for cell in cells))


async def read_ready(process: asyncio.subprocess.Process) -> CellReady:
    """The ready line of a cell's stdout; libraries may print other things before it. Raises CellError at its
    end.
    """
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b'{"ready"'):
            return msgspec.json.decode(line, type=CellReady)
    raise CellError("it ended before it was ready")


def last_words(log: Path) -> str:
    """The last line that a cell wrote to its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].removeprefix('error: ')[:_LAST_WORDS]} (its log is {log})" if lines else f"its log is {log}"


def _kill_session(process: asyncio.subprocess.Process) -> None:
    """The child leads a session of its own (start_new_session), so that its group's id is its pid."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
