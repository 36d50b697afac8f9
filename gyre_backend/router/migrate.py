"""What happens to a call's keys and values when it moves to another engine: nothing (they are computed again), or a pull.

The router calls `move` once per moved call, after the source has given up its partial reply and before the target is
asked to go on. Whatever goes wrong here costs time and nothing else: the target then computes the prefix again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from gyre_sdk.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a migration saved: tokens that the target need not compute again, and the bytes that went over."""

    tokens: int = 0
    nbytes: int = 0


NOTHING = Moved()


class KVMigrator(Protocol):
    """Carries keys and values from one engine to another."""

    @property
    def name(self) -> str:
        """prefill | embedded | sglang-hicache."""
        ...

    async def move(self, source: str, target: str, ids: list[int], call: dict[str, Any]) -> Moved:
        """Bring what `source` (URL) holds of `ids` to `target` (URL). Says what need not be computed again.

        `call` is the request's body (`cache_salt`, `extra_key`). Returns only when the source's memory is free of it. Never raises.
        """
        ...


class PrefillMigrator:
    """The default: the target computes the prefix again."""

    name = "prefill"

    async def move(self, source: str, target: str, ids: list[int], call: dict[str, Any]) -> Moved:
        """Nothing."""
        return NOTHING


class EmbeddedMigrator:
    """Between embedded engines: the source pins the blocks, the target pulls them and says so, the source lets go."""

    name = "embedded"

    def __init__(self, http: httpx.AsyncClient, *, deadline_s: float = 30.0) -> None:
        self._http = http
        self._deadline_s = deadline_s

    async def move(self, source: str, target: str, ids: list[int], call: dict[str, Any]) -> Moved:
        """Pin at the source, pull at the target, release at the source whatever happened."""
        key = {"input_ids": ids, "cache_salt": call.get("cache_salt"), "extra_key": call.get("extra_key")}
        ticket = None
        try:
            pinned = await self._http.post(f"{source}/kv/pin", json=key, timeout=self._deadline_s)
            if pinned.status_code != 200:
                return NOTHING
            ticket = pinned.json()
            pulled = await self._http.post(
                f"{target}/kv/pull", json={**key, **ticket, "source": source}, timeout=self._deadline_s
            )
            if pulled.status_code != 200:
                return NOTHING
            taken = pulled.json()
            return Moved(int(taken["tokens"]), int(taken["bytes"]))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            _log.warning("keys and values were not moved from %s to %s: %s", source, target, error)
            return NOTHING
        finally:
            if ticket is not None:
                await self._release(source, ticket)

    async def _release(self, source: str, ticket: dict[str, Any]) -> None:
        try:
            await self._http.post(f"{source}/kv/release", json={"ticket": ticket["ticket"]}, timeout=self._deadline_s)
        except httpx.HTTPError as error:
            _log.warning("%s did not release pinned keys and values: %s", source, error)


class HiCacheMigrator:
    """Between SGLang servers that share a Mooncake store as HiCache L3. Not run: HiCache needs a GPU.

    The servers run with `--enable-hierarchical-cache --hicache-write-policy write_through
    --hicache-storage-backend mooncake`. The aborted call's KV enters the radix tree and is written through to host and
    store; the target prefetches pages by their chained hash when the call arrives. Page hashes are seeded by
    `cache_salt`, which callers set per weight version, so KV of other weights is never hit. The store does not say when
    a write-back is done: `barrier_s` waits for it.
    """

    name = "sglang-hicache"

    def __init__(self, *, barrier_s: float = 0.5, page_tokens: int = 64) -> None:
        self._barrier_s = barrier_s
        self._page_tokens = page_tokens

    async def move(self, source: str, target: str, ids: list[int], call: dict[str, Any]) -> Moved:
        """Wait for the write-back; whole pages can then be found by the target. Nothing without a salt: versions could mix."""
        import anyio

        if not call.get("cache_salt"):
            return NOTHING
        await anyio.sleep(self._barrier_s)
        return Moved(len(ids) // self._page_tokens * self._page_tokens)


def make_migrator(name: str, http: httpx.AsyncClient) -> KVMigrator:
    """By name. Raises ConfigError."""
    if name == "prefill":
        return PrefillMigrator()
    if name == "embedded":
        return EmbeddedMigrator(http)
    if name == "sglang-hicache":
        return HiCacheMigrator()
    raise ConfigError(f"unknown KV migration {name!r}: prefill, embedded or sglang-hicache")
