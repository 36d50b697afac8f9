"""Keeps a gateway process alive: the listening socket stays open here, so its port never goes away, and a process that
dies is followed by another that goes on with every live execution. Harnesses see one reset connection, and retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import anyio
import httpx
import msgspec

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.capture.serving import LOOPBACK, listen
from gyre_sdk.errors import ConfigError, EngineError, EngineGoneError, GyreError, StorageError
from gyre_sdk.serving.settings import ADMIN, GatewaySettings, OpenReply, OpenRequest, Status
from gyre_sdk.wire.records import Outcome

log = logging.getLogger("gyre.serving")
START_S = 120.0
STOP_GRACE_S = 15.0
FAILED_STARTS = 3
"""Starts in a row that may end with an error of the process's own before the run is given up."""
PATIENCE_S = 300.0
"""How long an order waits for the gateway to come back, or for a full disk to have room."""


@dataclass(frozen=True, slots=True)
class OpenedExecution:
    """An execution that the gateway process has opened."""

    execution: str
    token: str


class GatewayProcess:
    """An async context manager: serves from its entry to its exit, through any number of deaths of the process.

    A `Recording` for the runner. Entering raises ConfigError (port, certificate, model folder, ...) and EngineGoneError.
    `on_restart` is told how often the process was started anew.
    """

    def __init__(self, settings: GatewaySettings, *, port: int = 0, log_file: Path | None = None) -> None:
        self._first = msgspec.structs.replace(
            settings,
            admin_token=settings.admin_token or secrets.token_urlsafe(32),
            run_dir=str(Path(settings.run_dir).resolve()),
        )
        if settings.host not in LOOPBACK and (settings.tls is None or not settings.admin_token):
            raise ConfigError(
                f"{settings.host} is no loopback address: it is only served with TLS (a certificate and its key) "
                "and an admin token"
            )
        if settings.tls is not None:
            settings.tls.check()
        self.restarts = 0
        self.serving = False
        """Whether a process serves just now, as far as is known."""
        self.base_url = ""
        self.recovered: list[str] = []
        """Executions of an earlier process that this one has gone on with, at its first start."""
        self._wanted_port = port
        self._log_path = log_file or Path(settings.run_dir) / "gateway.log"
        self._listener: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._failure: GyreError | None = None
        self._failed = asyncio.Event()
        self._http: httpx.AsyncClient | None = None

    @property
    def admin_token(self) -> str:
        """Guards open, seal and status."""
        return self._first.admin_token

    @property
    def port(self) -> int:
        """Where it listens, for as long as this object is entered."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    @property
    def failure(self) -> GyreError | None:
        """Why no further process is started; None while all is well."""
        return self._failure

    async def failed(self) -> None:
        """Returns when no gateway can be started any more; `failure` says why."""
        await self._failed.wait()

    @property
    def pid(self) -> int | None:
        """Process id of the gateway that runs now."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def __aenter__(self) -> GatewayProcess:
        Path(self._first.run_dir).mkdir(parents=True, exist_ok=True)
        self._listener = listen(self._first.host, self._wanted_port)
        self._first = msgspec.structs.replace(self._first, listener=self._listener.fileno())
        try:
            self.recovered = await self._start(self._first)
        except BaseException:  # cleans up and raises again
            with anyio.CancelScope(shield=True):
                await self._end()
            self._listener.close()
            raise
        self._http = httpx.AsyncClient(
            base_url=self._local_url(),
            headers={"Authorization": f"Bearer {self.admin_token}"},
            timeout=httpx.Timeout(60.0, read=None),
            trust_env=False,
            verify=self._trust(),
        )
        self._monitor = asyncio.create_task(self._watch(), name="gyre-gateway-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            if self._monitor is not None:
                self._monitor.cancel()
                await asyncio.gather(self._monitor, return_exceptions=True)
            if self._http is not None:
                await self._http.aclose()
            await self._end()
            if self._listener is not None:
                self._listener.close()

    # -- what the owner of the run wants -----------------------------------------------------------------------

    async def open(self, spec: ExecutionSpec) -> OpenedExecution:
        """Begin an execution. Raises ConfigError, StorageError, EngineError."""
        asked = OpenRequest(
            execution=spec.execution or secrets.token_hex(6),
            token=secrets.token_urlsafe(32),  # ours, so that asking again after a crash is harmless
            group=spec.group,
            task=spec.task,
            harness=spec.harness,
            deadline_s=spec.deadline_s,
            meta=spec.meta,
        )
        reply = msgspec.json.decode(await self._order("POST", "/executions", asked), type=OpenReply)
        return OpenedExecution(reply.execution, reply.token)

    async def seal(self, execution: str, outcome: Outcome) -> None:
        """End an execution, once. Idempotent for an equal outcome. Raises ConfigError, StorageError."""
        await self._order("POST", f"/executions/{execution}/seal", outcome)

    async def status(self) -> Status:
        """How things stand."""
        return msgspec.json.decode(await self._order("GET", "/status"), type=Status)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until the backend has acknowledged everything; False when `timeout_s` passed first."""
        answer = await self._order("POST", f"/drain?timeout={timeout_s:g}")
        return bool(msgspec.json.decode(answer, type=dict[str, bool])["drained"])

    async def _order(self, method: str, path: str, body: object = None) -> bytes:
        """Ask until there is an answer: the process may die and come back meanwhile, a full disk may get room."""
        assert self._http is not None
        until, wait = time.monotonic() + PATIENCE_S, 0.05
        content = None if body is None else msgspec.json.encode(body)
        while True:
            if self._failure is not None:
                raise self._failure
            error: GyreError
            try:
                answer = await self._http.request(method, f"{ADMIN}{path}", content=content)
            except httpx.TransportError as gone:
                error = EngineGoneError(f"the gateway process does not answer: {type(gone).__name__}")
            else:
                if answer.status_code == 200:
                    return answer.content
                error = _error_of(answer)
                if isinstance(error, ConfigError):
                    raise error
            if time.monotonic() > until:
                raise error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), wait)
            wait = min(2.0, 2 * wait)

    # -- the process -------------------------------------------------------------------------------------------

    def _local_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._first.host, self._first.host)
        return f"{'https' if self._first.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def _trust(self) -> ssl.SSLContext | bool:
        """We ask the very process that we started, through a socket that we hold: its certificate is not checked for a name."""
        if self._first.tls is None:
            return True
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    async def _start(self, settings: GatewaySettings) -> list[str]:
        """Start a process and wait until it serves. Raises ConfigError with its last words, EngineGoneError."""
        assert self._listener is not None
        with self._log_path.open("ab") as errors:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gyre_sdk.serving",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                pass_fds=(self._listener.fileno(),),
                start_new_session=True,  # a Ctrl-C in the terminal reaches us first; we end it in order
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            await process.stdin.drain()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError:
            raise EngineGoneError(f"the gateway was not ready after {START_S:g} s; see {self._log_path}") from None
        if not line:
            code = await process.wait()
            if code < 0:
                raise _KilledError(code)
            raise ConfigError(
                _last_words(self._log_path) or f"the gateway ended with code {code}; see {self._log_path}"
            )
        ready = msgspec.json.decode(line, type=dict[str, object])
        self.base_url = str(ready["url"])
        self.serving = True
        recovered = ready["recovered"]
        return [str(name) for name in recovered] if isinstance(recovered, list) else []

    async def _watch(self) -> None:
        """Start the next process whenever one is dead; give up when starting fails again and again."""
        again = msgspec.structs.replace(self._first, unsealed="keep")
        failed = 0
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self.serving = False
            log.warning("the gateway process ended (%d); starting another", code)
            self.restarts += 1
            while True:
                try:
                    await self._start(again)
                except (ConfigError, EngineError) as error:
                    failed += 1
                    if failed >= FAILED_STARTS:
                        self._failure = error
                        self._failed.set()
                        return
                    await self._end()
                    await asyncio.sleep(0.2 * 2**failed)
                except _KilledError:
                    await asyncio.sleep(0.1)
                else:
                    failed = 0
                    break

    async def _end(self) -> None:
        """Ask it to end (its stdin closes), then kill it."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # or its pipes are closed when it is collected, with a warning


class _KilledError(Exception):
    """The process was killed while it started: not its own doing."""


def _error_of(answer: httpx.Response) -> GyreError:
    try:
        message = msgspec.json.decode(answer.content, type=dict[str, str]).get("error", "")
    except msgspec.MsgspecError:
        message = answer.text[:300]
    if answer.status_code == 507:
        return StorageError(message)
    return EngineError(message) if answer.status_code >= 500 else ConfigError(message)


def _last_words(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error:").strip() if lines else ""
