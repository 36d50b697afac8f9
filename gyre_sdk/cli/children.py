"""Services started as children: one ready line on stdout, dead when we are dead, their last words in our error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from gyre_sdk.errors import ConfigError, EngineGoneError

STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Child:
    """A running service: the ready line's content, and the process."""

    ready: dict[str, object]
    process: anyio.abc.Process
    log: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self.ready["url"])


@asynccontextmanager
async def service(
    module: str, arguments: Sequence[str], *, log: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """Run `python -m module arguments` until the block ends. stderr goes to `log`.

    Raises ConfigError with the child's last line when it ends before it is ready, EngineGoneError when it is not
    ready after `timeout_s`. The child is asked to end (SIGTERM, and its stdin closes), then killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        process = await anyio.open_process(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=None if env is None else dict(env),
            start_new_session=True,  # a Ctrl-C in the terminal reaches us first; we end it in order
        )
    try:
        ready = await _ready_line(process, module, log, timeout_s)
        yield Child(ready, process, log)
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)


async def _ready_line(process: anyio.abc.Process, module: str, log: Path, timeout_s: float) -> dict[str, object]:
    assert process.stdout is not None
    buffer = b""
    with anyio.move_on_after(timeout_s) as scope:
        async for chunk in process.stdout:
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if line.startswith(b"{"):
                    return msgspec.json.decode(line, type=dict[str, object])
    if scope.cancelled_caught:
        raise EngineGoneError(f"{module} was not ready after {timeout_s:g} s; its log is {log}")
    await process.wait()
    raise ConfigError(_last_words(log) or f"{module} ended with code {process.returncode}; its log is {log}")


def _last_words(log: Path) -> str:
    """The last line of a log, without the `error:` that our own services put before it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error:").strip() if lines else ""


async def _stop(process: anyio.abc.Process) -> None:
    if process.returncode is None:
        process.terminate()
        if process.stdin is not None:
            await process.stdin.aclose()
        with anyio.move_on_after(STOP_GRACE_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.aclose()
