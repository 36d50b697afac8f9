"""Control of an SGLang server: pauses, weight updates and memory release, in the order that SGLang needs.

Works against the embedded engine as well, which answers the same calls. Memory release is written to SGLang's documented order and has
not been run: it needs a GPU and a server started with `--enable-memory-saver`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anyio
import httpx

from gyre_backend.errors import WeightsError
from gyre_sdk.errors import EngineError, EngineGoneError

PauseMode = Literal["abort", "retract", "in_place"]


class EngineControl:
    """Drives one server. Every call raises EngineGoneError when there is no answer, EngineError when it says no."""

    def __init__(self, url: str, *, http: httpx.AsyncClient | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._http = http or httpx.AsyncClient(base_url=self.url, timeout=timeout_s, trust_env=False)
        self._owns = http is None

    async def aclose(self) -> None:
        """Close the connections, if they are ours."""
        if self._owns:
            await self._http.aclose()

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating. Replies of aborted calls are delivered before this returns."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Generate again, and see that the server says so."""
        await self._post("/continue_generation", {})
        await self.until_ready(30.0)

    async def flush(self) -> None:
        """Empty the prefix cache; the server must be idle or paused without calls that hold it."""
        await self._post("/flush_cache", {})

    async def version(self) -> str:
        """Weight version served."""
        return str((await self._get("/model_info"))["weight_version"])

    async def checksum(self) -> Any:
        """The server's own digest of its weights: equal for equal weights on the same kind of server."""
        return (await self._post("/weights_checker", {"action": "checksum"})).json()["ranks"][0]["per_gpu_checksum"]

    async def load(self) -> dict[str, Any]:
        """Running and waiting requests, tokens in use and at most."""
        loads: list[dict[str, Any]] = (await self._get("/v1/loads"))["loads"]
        return loads[0]

    async def update_from_disk(self, folder: Path, version: int | str, *, expect_checksum: Any = None) -> None:
        """Serve the weights of `folder` as `version`: pause (retract), begin, update, end, verify, continue.

        Raises WeightsError when the server then reports another version or checksum; it stays paused in that case.
        """
        await self.pause("retract")
        await self.load_weights(folder, version, expect_checksum=expect_checksum)
        await self.resume()

    async def load_weights(self, folder: Path, version: int | str, *, expect_checksum: Any = None) -> None:
        """The part of an update between pause and continue: begin, update, end, verify. Raises WeightsError, EngineError."""
        await self._update(folder, version)
        await self._verify(version, expect_checksum)

    async def release_memory(self) -> None:
        """Rollout → training: end calls, then give back the cache and the weights, in this order. Not run without a GPU."""
        await self.pause("abort")
        await self._until_idle(30.0)
        await self.flush()
        for tag in ("kv_cache", "weights"):
            await self._post("/release_memory_occupation", {"tags": [tag]})

    async def restore_memory(self, folder: Path, version: int | str, *, expect_checksum: Any = None) -> None:
        """Training → rollout: weights' memory, new weights, verified, then the cache's memory; `resume` follows. Not run without a GPU."""
        await self._post("/resume_memory_occupation", {"tags": ["weights"]})
        await self.load_weights(folder, version, expect_checksum=expect_checksum)
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    async def healthy(self) -> bool:
        """Whether it answers /health with 200 now."""
        try:
            return (await self._http.get(f"{self.url}/health", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def until_ready(self, timeout_s: float) -> None:
        """Until /ready answers 200. Raises EngineGoneError."""
        with anyio.move_on_after(timeout_s):
            while True:
                try:
                    if (await self._http.get(f"{self.url}/ready", timeout=10.0)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await anyio.sleep(0.05)
        raise EngineGoneError(f"{self.url} was not ready within {timeout_s:g} s")

    async def _update(self, folder: Path, version: int | str) -> None:
        # update_weights_from_disk needs no bracket; the bracket tells the server's other clients that weights are in motion.
        await self._post("/begin_weight_update", {})
        try:
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
            await self._post("/update_weights_from_disk", body)
        finally:
            await self._post("/end_weight_update", {})

    async def _verify(self, version: int | str, expect_checksum: Any) -> None:
        served = await self.version()
        if served != str(version):
            raise WeightsError(f"{self.url} serves version {served} after an update to {version}")
        if expect_checksum is not None:
            found = await self.checksum()
            if found != expect_checksum:
                raise WeightsError(
                    f"{self.url} holds weights {found} after an update to version {version}, not {expect_checksum}"
                )

    async def _until_idle(self, timeout_s: float) -> None:
        with anyio.move_on_after(timeout_s):
            while True:
                load = await self.load()
                if load["num_running_reqs"] + load["num_waiting_reqs"] == 0:
                    return
                await anyio.sleep(0.05)
        raise EngineError(f"{self.url} is not idle after {timeout_s:g} s")

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            answer = await self._http.post(f"{self.url}{path}", json=body)
        except httpx.TransportError as error:
            raise EngineGoneError(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code != 200:
            refused = EngineError(f"{self.url} answered {answer.status_code} to {path}: {answer.text[:200]}")
            refused.status = answer.status_code
            raise refused
        return answer

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(f"{self.url}{path}")
        except httpx.TransportError as error:
            raise EngineGoneError(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code != 200:
            raise EngineError(f"{self.url} answered {answer.status_code} to {path}: {answer.text[:200]}")
        data: dict[str, Any] = answer.json()
        return data
