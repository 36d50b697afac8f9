"""A process that has imported what cells need, and forks one cell per request: a new cell is up in a second
instead of ten.

Started by the local runtime with one end of a socket pair as its stdin. A request is a message with three
descriptors (stdin, stdout and
stderr of the cell); the answer is its pid; when a cell ends, its wait status follows. Single-threaded, and
nothing of torch has run before
the fork but its import. Cells die with this process, and it dies with the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_POLL_S = 0.05
ANSWER_S = 30.0
"""A zygote that has not forked, or not reported an end, by then does not answer any more: it is killed, and its cells with it."""


def main() -> None:
    """The zygote's own loop."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    _preload(sys.argv[1])
    control.sendall(b'{"up": true}\n')
    while True:
        readable, _, _ = select.select([control], [], [], _POLL_S)
        if readable:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 3)
            if not message:
                return
            _fork(control, json.loads(message), descriptors)
        _reap(control)


def _preload(model_dir: str) -> None:
    """Import everything that a cell of this model will; most of a start's seconds are transformers' lazy
    imports.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import gyre_backend.algorithms.ppo_clip
    import gyre_backend.cells.worker
    import gyre_backend.engines.embedded
    import gyre_backend.trainers.hf  # noqa: F401

    with contextlib.suppress(OSError, ValueError), torch.device("meta"):  # what is wrong with it, the cell will say
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir, local_files_only=True))


def _die_with_parent() -> None:
    """By signal only: a watching thread would not survive a fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(1)


def _fork(control: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    pid = os.fork()
    if pid == 0:
        control.close()
        os.setsid()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(request["env"])
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1)
        code = 1
        try:
            from gyre_backend.cells.worker import main as work

            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # the boundary of the cell's process: its log gets the traceback
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)
    for descriptor in descriptors:
        os.close(descriptor)
    control.sendall(json.dumps({"request": request["request"], "pid": pid}).encode() + b"\n")


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.sendall(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


class ForkedProcess:
    """A forked cell, with the part of asyncio's process interface that the runtime uses."""

    def __init__(self, pid: int, stdin: int, stdout: asyncio.StreamReader, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._stdin = stdin
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Until it has ended."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def close_stdin(self) -> None:
        """The cell's sign that its parent has gone."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


class Zygote:
    """The runtime's side: starts the process at the first use, and again when it is gone."""

    command: tuple[str, ...] = (sys.executable, "-m", "gyre_backend.cells.runtime.zygote")

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._requests: dict[int, asyncio.Future[tuple[int, asyncio.Future[int]]]] = {}
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None before the first use."""
        return None if self._process is None else self._process.pid

    async def fork(self, first_line: bytes, env: dict[str, str], log: Path, model_dir: str) -> ForkedProcess:
        """Fork a cell and hand it its first line of stdin. Raises ConnectionError when the zygote is gone, or does not answer.

        Given up half way (a time-out), the cell finds its stdin at an end and goes away by itself.
        """
        async with self._lock:
            if self._listener is None or self._listener.done():
                await self._start(model_dir)
        stdin_r, stdin_w = os.pipe()
        stdout_r, stdout_w = os.pipe()
        try:
            try:
                asked = self._ask(env, log, [stdin_r, stdout_w])
            finally:
                os.close(stdin_r)
                os.close(stdout_w)
            pid, ended = await self._answer(asked)
            os.write(stdin_w, first_line)
            reader = asyncio.StreamReader(limit=1 << 20)
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdout_r, "rb", buffering=0, closefd=True)
            )
        except BaseException:  # cleans up and raises again
            os.close(stdin_w)
            with contextlib.suppress(OSError):
                os.close(stdout_r)
            raise
        return ForkedProcess(pid, stdin_w, reader, ended)

    def _ask(self, env: dict[str, str], log: Path, pipes: list[int]) -> asyncio.Future[tuple[int, asyncio.Future[int]]]:
        assert self._control is not None
        number = next(self._numbers)
        with log.open("ab") as errors:
            message = json.dumps({"request": number, "env": env}).encode()
            socket.send_fds(self._control, [message], [*pipes, errors.fileno()])
        asked = self._requests[number] = asyncio.get_running_loop().create_future()
        return asked

    async def _answer(self, asked: asyncio.Future[tuple[int, asyncio.Future[int]]]) -> tuple[int, asyncio.Future[int]]:
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        except TimeoutError:
            self.kill()
            raise ConnectionError("the process that forks cells does not answer") from None

    async def _start(self, model_dir: str) -> None:
        self._hang_up()
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                model_dir,
                stdin=theirs.fileno(),
                stderr=errors,
                start_new_session=True,
            )
        theirs.close()
        ours.setblocking(False)
        self._control = ours
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours.dup())
            line = await reader.readline()
        except BaseException:  # cleans up and raises again
            self.kill()
            raise
        if not line:
            raise ConnectionError(f"the process that forks cells did not come up; its log is {self._log}")
        self._listener = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Until the zygote is gone: then every cell of it is, too, and nobody waits for an answer any more."""
        loop = asyncio.get_running_loop()
        ended: dict[int, asyncio.Future[int]] = {}
        self._ended = ended
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._heard(json.loads(line), ended, loop)
        finally:
            for future in ended.values():
                if not future.done():
                    future.set_result(-signal.SIGKILL)
            asked, self._requests = self._requests, {}
            for waiting in asked.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("the process that forks cells has ended"))

    def _heard(
        self, message: dict[str, int], ended: dict[int, asyncio.Future[int]], loop: asyncio.AbstractEventLoop
    ) -> None:
        if "pid" in message:
            # Known before anyone asks: a cell may end before the one who wanted it has looked.
            future = ended[message["pid"]] = loop.create_future()
            asked = self._requests.pop(message["request"], None)
            if asked is not None and not asked.done():
                asked.set_result((message["pid"], future))
        else:
            over = ended.pop(message["ended"], None)
            if over is not None and not over.done():
                over.set_result(message["status"])

    def kill(self) -> None:
        """End the process, and with it every cell that it has forked. The next fork starts another."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._control is not None:
            self._control.close()
        self._listener = self._writer = self._control = None

    async def aclose(self) -> None:
        """End the zygote; cells that are left end with it."""
        self._hang_up()
        self.kill()
        if self._process is not None:
            await self._process.wait()


if __name__ == "__main__":
    main()
