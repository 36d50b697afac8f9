"""One call on an engine, continued elsewhere or anew from its partial tokens when the engine fails in mid-reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import msgspec
import numpy as np

from gyre_sdk.capture.config import GatewayConfig
from gyre_sdk.capture.live import LiveCall
from gyre_sdk.errors import EngineError, EngineGoneError
from gyre_sdk.sampling import Chunk, Completion, GenerateRequest, Sampling, TokenClient
from gyre_sdk.wire.records import Finish, Span

QUICK_ATTEMPTS = 2
"""Further attempts for a call that has no tokens yet."""
LONGEST_WAIT_S = 4.0
"""Between attempts, which start 0.1 s apart and double."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a call ended at the engine; its tokens are in the call's `sampled`."""

    finish: Finish
    cached_tokens: int
    engine: str


class EngineRun:
    """Drives one call. Tokens go to `call.sampled` as they arrive."""

    def __init__(
        self,
        client: TokenClient,
        config: GatewayConfig,
        stop_ids: Sequence[int] = (),
        on_tokens: Callable[[LiveCall], None] = lambda call: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._config = config
        self._stop_ids = frozenset(stop_ids)
        self._on_tokens = on_tokens
        self._now = now

    async def run(self, call: LiveCall, execution: str) -> Finished:
        """Raises EngineError when the engine refuses, or keeps failing."""
        assert call.prompt is not None
        assert call.sampling is not None
        attempts = 0
        while True:
            before = call.sampled.size
            finish = self._whole_already(call)
            if finish is not None:
                return Finished(finish, 0, "")
            try:
                completion = await self._attempt(call, execution, call.first_attempt + attempts)
            except EngineGoneError:
                self._close_spans(call, before)
                attempts += 1
                if attempts > self._allowed(call):
                    raise
                await anyio.sleep(min(0.05 * 2**attempts, LONGEST_WAIT_S))
                continue
            if completion.finish in ("abort", "error") and not call.abandoned:
                attempts += 1
                if attempts > self._allowed(call):
                    raise EngineGoneError(f"the engine ended the call before its end ({completion.finish})")
                await anyio.sleep(min(0.05 * 2**attempts, LONGEST_WAIT_S))
                continue
            return Finished(completion.finish, completion.cached_tokens, completion.engine)

    def _allowed(self, call: LiveCall) -> int:
        """Without tokens there is nothing to save: the harness is told soon, and asks again by itself."""
        allowed = self._config.resume_attempts
        return allowed if call.sampled.size else min(allowed, QUICK_ATTEMPTS)

    def _whole_already(self, call: LiveCall) -> Finish | None:
        """How the partial tokens end, when it is only the engine's last word that was lost."""
        sampled = call.sampled
        if not sampled.size or call.sampling is None:
            return None
        if int(sampled.ids[-1][-1]) in self._stop_ids and not call.sampling.ignore_eos:
            return "stop"
        return "length" if sampled.size >= call.sampling.max_new_tokens else None

    async def _attempt(self, call: LiveCall, execution: str, attempt: int) -> Completion:
        assert call.prompt is not None
        assert call.sampling is not None
        before = call.sampled.size
        prompt = call.prompt
        sampling: Sampling = call.sampling
        if before:
            prompt = np.concatenate([prompt, call.sampled.all_ids()])
            sampling = msgspec.structs.replace(sampling, max_new_tokens=max(1, sampling.max_new_tokens - before))
        request = GenerateRequest(
            rid=call.rid if attempt == 0 else f"{call.rid}{attempt}.",
            input_ids=prompt,
            sampling=sampling,
            cache_salt=self._config.cache_salt,
            session=execution,
        )
        completion: Completion | None = None
        try:
            async for event in self._client.generate(request):
                if isinstance(event, Chunk):
                    if call.first_token_at is None and len(event.output_ids):
                        call.first_token_at = self._now()
                    call.sampled.add(event.output_ids, event.logprobs, event.version)
                    self._on_tokens(call)
                    call.tell()
                else:
                    completion = event
        except BaseException as error:  # cleans up and raises again
            if completion is None and not isinstance(error, EngineError):
                with anyio.CancelScope(shield=True):
                    await self._client.abort(request.rid)
            raise
        if completion is None:
            raise EngineGoneError("the engine's stream ended without a completion")
        self._reconcile(call, completion, before)
        return completion

    def _reconcile(self, call: LiveCall, completion: Completion, before: int) -> None:
        """What a stream may have left out is in the completion; what it may have invented is an error."""
        streamed = call.sampled.size - before
        if streamed > len(completion.output_ids):
            raise EngineError(
                f"the engine streamed {streamed} tokens but completed {len(completion.output_ids)}: not recorded"
            )
        if streamed:
            tail = call.sampled.all_ids()[before:]
            if not np.array_equal(tail, completion.output_ids[:streamed]):
                raise EngineError("the engine's streamed tokens differ from its completion: not recorded")
        call.sampled.add(completion.output_ids[streamed:], completion.logprobs[streamed:])
        if call.first_token_at is None and call.sampled.size:
            call.first_token_at = self._now()
        if len(completion.output_ids) != len(completion.logprobs):
            raise EngineError(
                f"the engine sent {len(completion.output_ids)} tokens with {len(completion.logprobs)} logprobs"
            )
        call.sampled.heard.clear()
        call.sampled.versions += [
            Span(span.version, span.start + before, span.end + before)
            for span in completion.versions
            if span.end > span.start
        ]

    def _close_spans(self, call: LiveCall, before: int) -> None:
        """Partial tokens of a lost stream: where nobody told their policy version, it is the one last seen."""
        sampled = call.sampled
        if sampled.size > before:
            version = sampled.versions[-1].version if sampled.versions else call.version_hint
            sampled.versions = list(sampled.spans(version))
        sampled.heard.clear()
