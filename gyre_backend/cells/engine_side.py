"""One cell's engine side: whatever generates, seen through SGLang's own control routes.

Both kinds are driven by the same calls in the same order (see docs/cells.md): pause, change or release
weights, resume. The embedded
engine lives in this process and reads the trainer's own memory; an SGLang server loads what the trainer
exports.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import httpx

from gyre_backend.engines.sglang import EngineControl
from gyre_backend.errors import CellError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gyre_backend.config import BackendConfig
    from gyre_backend.trainers.base import Trainer
    from gyre_backend.weights.transport import Transport

log = logging.getLogger(__name__)


class EngineSide(Protocol):
    """The engine of a cell. Calls come one at a time."""

    @property
    def url(self) -> str:
        """Where the router sends requests; empty when the cell's own address serves them."""
        ...

    @property
    def app(self) -> ASGIApp | None:
        """The engine's routes, when they are served by the cell's process."""
        ...

    async def start(self) -> None:
        """Bring it up; it serves when this returns."""
        ...

    async def release(self) -> None:
        """End what still runs (partial replies are delivered), stop generating, give memory back."""
        ...

    async def freeze(self) -> None:
        """Hold running requests where they are, for a change of weights under them."""
        ...

    async def take(self, version: int) -> None:
        """The trainer's weights are now `version`: serve them. Called between freeze (or release) and
        resume.
        """
        ...

    async def resume(self) -> None:
        """Generate again."""
        ...

    async def aclose(self) -> None:
        """End it."""
        ...


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = await http.post(path, json=body)
    if answer.status_code != 200:
        raise CellError(f"the engine answered {answer.status_code} to {path}: {answer.text[:200]}")
    return answer


class EmbeddedSide:
    """The embedded engine on a second module that shares the trainer's parameters: one copy of the weights
    per cell.
    """

    def __init__(self, trainer: Trainer, config: BackendConfig, transport: Transport) -> None:
        from gyre_backend.cells.sharing import engine_model
        from gyre_backend.engines.embedded import EmbeddedEngine

        self._engine = EmbeddedEngine(
            engine_model(trainer),
            version=trainer.version,
            context_length=config.model.context or None,
            transport=transport,
            **config.engine.options,
        )
        self._app: ASGIApp = self._engine.app()
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://engine", timeout=None)

    @property
    def url(self) -> str:
        """The cell's own address."""
        return ""

    @property
    def app(self) -> ASGIApp | None:
        """The engine's routes."""
        return self._app

    async def start(self) -> None:
        """It serves as soon as its routes are mounted."""

    async def release(self) -> None:
        """Abort, then drop the prefix cache."""
        await _post(self._http, "/pause_generation", {"mode": "abort"})
        await _post(self._http, "/flush_cache", {})

    async def freeze(self) -> None:
        """Running requests keep their place and go on with the new weights: their versions say so."""
        await _post(self._http, "/pause_generation", {"mode": "retract"})

    async def take(self, version: int) -> None:
        """The memory is shared: only the version changes, and cached keys of old weights go."""
        self._engine.update_weights(None, version)

    async def resume(self) -> None:
        """Generate again."""
        await _post(self._http, "/continue_generation", {})

    async def aclose(self) -> None:
        """Close the engine."""
        await self._http.aclose()
        self._engine.close()


class SGLangSide:
    """A real SGLang server: launched per cell, or one that runs already. Weights reach it through a folder.

    The memory release is written to the documented order and needs a GPU and `--enable-memory-saver`; it is only
    asked for when the launch command names that flag.
    """

    def __init__(self, trainer: Trainer, config: BackendConfig, model_dir: Path, work_dir: Path) -> None:
        self._trainer = trainer
        self._table = config.engine
        self._model_dir = model_dir
        self._folder = work_dir / "engine-weights"
        self._url = config.engine.url.rstrip("/")
        self._process: subprocess.Popen[bytes] | None = None
        self._log = work_dir / "sglang.log"
        self._saves_memory = "--enable-memory-saver" in config.engine.command
        self._released = False
        self._loaded: tuple[str, Any] | None = None
        """Digest of the exported files that the server loaded last, and the checksum it then reported."""
        self._control = EngineControl(self._url)

    @property
    def url(self) -> str:
        """The server's address."""
        return self._url

    @property
    def app(self) -> ASGIApp | None:
        """It has its own process."""
        return None

    async def start(self) -> None:
        """Launch it when no URL was given; wait until it is ready; bring it to the trainer's version."""
        if not self._url:
            port = _free_port()
            self._url = f"http://127.0.0.1:{port}"
            self._control = EngineControl(self._url)
            self._process = self._launch(port)
        with anyio.move_on_after(self._table.start_timeout_s) as scope:
            await self._until_healthy()
        if scope.cancelled_caught:
            raise CellError(
                f"SGLang at {self._url} was not ready after {self._table.start_timeout_s:g} s; see {self._log}"
            )
        if self._trainer.version or self._process is None:
            await self.freeze()
            await self.take(self._trainer.version)
            await self.resume()

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        command = self._table.command or (
            sys.executable, "-m", "sglang.launch_server", "--model-path", "{model}", "--host", "127.0.0.1",
            "--port", "{port}", "--skip-tokenizer-init", "--weight-version", "0",
        )  # fmt: skip
        filled = [part.replace("{model}", str(self._model_dir)).replace("{port}", str(port)) for part in command]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # The same session as the cell: the runtime ends both together.
            return subprocess.Popen(filled, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ.copy())

    async def _until_healthy(self) -> None:
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise CellError(f"SGLang ended with code {self._process.returncode}; see {self._log}")
            if await self._control.healthy():
                return
            await anyio.sleep(0.5)

    async def release(self) -> None:
        """Abort, pause, flush; with the memory saver release the cache, then the weights."""
        if self._saves_memory:
            await self._control.release_memory()
            self._released = True
        else:
            await self._control.pause("abort")
            await self._control.flush()

    async def freeze(self) -> None:
        """Put running requests back in the queue; they go on with the new weights."""
        await self._control.pause("retract")

    async def take(self, version: int) -> None:
        """Export, load from disk, check the version and the checksum that the server then reports.

        Equal files must give an equal checksum. Raises CellError, EngineError or WeightsError; it stays paused then.
        """
        folder = self._folder / f"v{version:06d}"
        await anyio.to_thread.run_sync(self._trainer.export_hf, folder)
        try:
            digest = await anyio.to_thread.run_sync(folder_digest, folder)
            known = self._loaded[1] if self._loaded is not None and self._loaded[0] == digest else None
            load = self._control.restore_memory if self._released else self._control.load_weights
            await load(folder, version, expect_checksum=known)
            self._released = False
            checksum = await self._control.checksum()
        finally:
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
        if self._loaded is not None and self._loaded[0] != digest and self._loaded[1] == checksum:
            log.warning("%s: same weights after an update to %d; less than its dtype can show?", self._url, version)
        self._loaded = (digest, checksum)

    async def resume(self) -> None:
        """Generate again."""
        await self._control.resume()

    async def aclose(self) -> None:
        """End the server if this cell launched it."""
        await self._control.aclose()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            await anyio.to_thread.run_sync(_reap, self._process)


def folder_digest(folder: Path) -> str:
    """Digest of a model folder's weight files."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        state.update(path.name.encode())
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "blake2b").digest())
    return state.hexdigest()


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_engine_side(
    config: BackendConfig, trainer: Trainer, model_dir: Path, work_dir: Path, transport: Transport
) -> EngineSide:
    """The engine that the configuration names. `transport` carries keys and values between embedded engines."""
    maker: Callable[[], EngineSide] = (
        (lambda: EmbeddedSide(trainer, config, transport))
        if config.engine.kind == "embedded"
        else (lambda: SGLangSide(trainer, config, model_dir, work_dir))
    )
    return maker()
