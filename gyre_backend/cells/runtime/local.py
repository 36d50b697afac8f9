"""Cells as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from gyre_backend.cells.runtime.zygote import ANSWER_S, Zygote
from gyre_backend.cells.spec import CellReady, CellSpec
from gyre_backend.errors import CellError

_LAST_WORDS = 300


class CellProcess(Protocol):
    """What the runtime needs of a cell's process."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def close_stdin(self) -> None: ...


class _Spawned:
    """asyncio's process in that shape."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._process = process
        self._stdin = process.stdin
        self.stdout = process.stdout
        self.pid = process.pid
        self.wait = process.wait

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def close_stdin(self) -> None:
        self._stdin.close()


class LocalCell:
    """One cell process, its session and its log."""

    def __init__(self, process: CellProcess, ready: CellReady, log: Path, parent: Zygote | None = None) -> None:
        self._parent = parent
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
        await reaped(self._process, self._parent)

    def _end_session(self) -> None:
        """Once: after that the number may belong to someone else."""
        if not self._ended:
            self._ended = True
            _kill_session(self._process.pid)

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM and end of stdin, then SIGKILL."""
        if self._process.returncode is None:
            self._process.terminate()
            self._process.close_stdin()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await self.kill()


class LocalRuntime:
    """A process per cell, supervised by whoever awaits `CellHandle.wait`."""

    def __init__(self, log_dir: Path, *, preload: bool = False) -> None:
        self.log_dir = log_dir
        self._cells: list[LocalCell] = []
        self._zygote = Zygote(log_dir / "preload.log") if preload and sys.platform == "linux" else None

    async def start(self, spec: CellSpec, timeout_s: float) -> LocalCell:
        """Start a worker and wait for its ready line."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{spec.name}.log"
        process: CellProcess | None = None
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._launch(spec, log)
                ready = await read_ready(process)
        except BaseException as error:  # cleans up and raises again
            if process is not None:
                _kill_session(process.pid)
                await asyncio.shield(reaped(process, self._zygote))
            if isinstance(error, TimeoutError):
                raise CellError(f"cell {spec.name} was not ready after {timeout_s:g} s; its log is {log}") from error
            if isinstance(error, (CellError, OSError)):
                raise CellError(f"cell {spec.name} did not come up: {last_words(log)}") from error
            raise
        cell = LocalCell(process, ready, log, self._zygote)
        self._cells = [c for c in self._cells if c._process.returncode is None] + [cell]
        return cell

    async def _launch(self, spec: CellSpec, log: Path) -> CellProcess:
        line = msgspec.json.encode(spec) + b"\n"
        if self._zygote is not None:
            return await self._zygote.fork(line, spec.env, log, spec.model_dir)
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
        assert process.stdin is not None
        process.stdin.write(line)
        return _Spawned(process)

    async def aclose(self) -> None:
        """Stop every cell that is still there, all at once."""
        cells, self._cells = self._cells, []
        await asyncio.gather(*(cell.stop() for cell in cells))
        if self._zygote is not None:
            await self._zygote.aclose()


async def reaped(process: CellProcess, parent: Zygote | None) -> None:
    """Until a killed process is gone. A zygote that does not report it (it is stopped, say) is killed: its cells end with it."""
    if parent is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ANSWER_S)
            return
        parent.kill()
    await process.wait()


async def read_ready(process: CellProcess) -> CellReady:
    """The ready line of a cell's stdout; libraries may print other things before it. Raises CellError at its
    end.
    """
    async for line in process.stdout:
        if line.startswith(b'{"ready"'):
            return msgspec.json.decode(line, type=CellReady)
    raise CellError("it ended before it was ready")


def last_words(log: Path) -> str:
    """The last line that a cell wrote to its log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[-1].removeprefix('error: ')[:_LAST_WORDS]} (its log is {log})" if lines else f"its log is {log}"


def _kill_session(pid: int) -> None:
    """A cell leads a session of its own, so that its group's id is its pid."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
