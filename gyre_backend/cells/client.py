"""The service's side of a cell's control routes. Every call has a time-out; a cell that misses it counts as
hung.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gyre_backend.cells.spec import CellReady
from gyre_backend.errors import CellError
from gyre_backend.trainers.base import MicroStepResult, StepResult
from gyre_backend.weights import Manifest, PullReport


class CellRefused(CellError):
    """The cell answered, and says no: it is alive, and what was asked did not happen."""


class CellClient:
    """Calls one cell. Raises CellRefused for an answer that says no, CellError when there is none in time."""

    def __init__(self, name: str, ready: CellReady, token: str, *, call_s: float, long_s: float) -> None:
        self.name = name
        self.ready = ready
        self._long_s = long_s
        self._http = httpx.AsyncClient(
            base_url=ready.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(call_s),
            limits=httpx.Limits(max_connections=8),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """role, version, step, epoch."""
        return dict((await self._call("GET", "status", timeout=timeout_s)).json())

    async def train(self) -> None:
        """Rollout → training: the engine stops and gives its memory back."""
        await self._call("POST", "train", json={})

    async def serve(self) -> int:
        """Training → rollout; returns the version that is served."""
        return int((await self._call("POST", "serve", json={})).json()["version"])

    async def begin(self, step: int, epoch: int, *, keep: bool = False) -> None:
        """Micro-steps of `epoch` count from now on; nothing is accumulated, or with `keep` what there is
        stays.
        """
        await self._call("POST", "begin", json={"step": step, "epoch": epoch, "keep": keep})

    async def micro(self, micro: int, epoch: int, plan: bytes) -> MicroStepResult:
        """One forward-backward of a plan (`plan_to_bytes`)."""
        answer = await self._call(
            "POST", "micro", params={"micro": micro, "epoch": epoch}, content=plan, timeout=self._long_s
        )
        return msgspec.json.decode(answer.content, type=MicroStepResult)

    async def publish(self) -> Manifest:
        """Manifest of the weights held."""
        return Manifest.from_bytes((await self._call("POST", "publish", timeout=self._long_s)).content)

    async def pull(self, manifest: Manifest) -> PullReport:
        """Become the manifest's version."""
        answer = await self._call("POST", "pull", content=manifest.to_bytes(), timeout=self._long_s)
        return msgspec.json.decode(answer.content, type=PullReport)

    async def gradients(self, epoch: int, micros: Sequence[int]) -> Manifest:
        """Freeze the gradient of `micros` and let the core read it."""
        answer = await self._call(
            "POST", "gradients", json={"epoch": epoch, "micros": list(micros)}, timeout=self._long_s
        )
        return Manifest.from_bytes(answer.content)

    async def add(self, manifest: Manifest, micros: Sequence[int]) -> int:
        """Pull another cell's gradient and add it; returns bytes."""
        params = {"micros": ",".join(str(micro) for micro in micros)}
        answer = await self._call("POST", "add", params=params, content=manifest.to_bytes(), timeout=self._long_s)
        return int(answer.json()["bytes"])

    async def step(self, num_executions: int, micros: Sequence[int]) -> StepResult:
        """The optimizer step (core only), refused unless exactly `micros` are in its gradient."""
        body = {"num_executions": num_executions, "micros": list(micros)}
        answer = await self._call("POST", "step", json=body, timeout=self._long_s)
        return msgspec.json.decode(answer.content, type=StepResult)

    async def save(self, path: Path) -> str:
        """Write a checkpoint; returns the weights' digest."""
        answer = await self._call("POST", "save", json={"path": str(path)}, timeout=self._long_s)
        return str(answer.json()["digest"])

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        await self._call("POST", "export", json={"path": str(path)}, timeout=self._long_s)

    async def _call(self, method: str, route: str, **arguments: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, f"/cell/{route}", **arguments)
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise CellError(f"cell {self.name} did not answer {route}: {what}") from error
        if answer.status_code == 409:
            raise CellRefused(f"cell {self.name}: {answer.json()['error']}")
        if answer.status_code != 200:
            raise CellError(f"cell {self.name} answered {answer.status_code} to {route}: {answer.text[:200]}")
        return answer
