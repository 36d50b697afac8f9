"""Calls whose reply was not delivered whole: a repeated request gets them instead of a new sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gyre_sdk.capture.canonical import Digest
from gyre_sdk.capture.live import LiveCall


class Waiting:
    """The undelivered calls of one execution, by prompt. Tells clients that vanished from clients that wait."""

    def __init__(self, grace_s: float, abandon: Callable[[LiveCall], None]) -> None:
        self._grace_s = grace_s
        self._abandon = abandon
        self._by_prompt: dict[Digest, list[LiveCall]] = {}

    def add(self, call: LiveCall) -> None:
        """A call began, or was found unfinished after a restart."""
        self._by_prompt.setdefault(call.prompt_key, []).append(call)

    def remove(self, call: LiveCall) -> None:
        """The call was delivered, or failed."""
        calls = self._by_prompt.get(call.prompt_key, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._by_prompt.pop(call.prompt_key, None)
        self._keep(call)

    def claim(self, key: Digest) -> LiveCall | None:
        """A call with this prompt that nobody listens to any more; the caller listens to it from now on."""
        for call in self._by_prompt.get(key, []):
            if call.consumers == 0 and call.error is None:
                call.consumers += 1
                self._keep(call)
                return call
        return None

    def left(self, call: LiveCall) -> None:
        """The last client of an unfinished call is gone: stop it, now or after the grace time."""
        if self._grace_s <= 0:
            self._abandon(call)
        else:
            call.give_up = asyncio.get_running_loop().call_later(self._grace_s, self._abandon, call)

    def _keep(self, call: LiveCall) -> None:
        if call.give_up is not None:
            call.give_up.cancel()
            call.give_up = None
