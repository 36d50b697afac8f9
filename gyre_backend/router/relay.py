"""One client's call on its way through engines: placed, streamed, moved or resumed elsewhere, without a seam."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gyre_backend.router.placement import EngineState
from gyre_backend.router.reply import Event, Joined, decode_event
from gyre_sdk.errors import EngineError, EngineGoneError

if TYPE_CHECKING:
    from gyre_backend.router.router import Router

_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_encode = msgspec.json.Encoder().encode


class Refused(EngineError):
    """The engine, or the router itself, says no; `status` is what the client is answered with."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Relay:
    """Runs in a task of its own; what the client is to see comes out of `events`.

    `engine` is where it runs, `target` a place that is reserved for it elsewhere while it is being moved.
    """

    def __init__(self, router: Router, rid: str, body: dict[str, Any]) -> None:
        self.rid = rid
        self.session = str(body.get("session_id") or rid.partition(".")[0])
        self.prompt: Sequence[int] = body["input_ids"]
        self.joined = Joined(len(self.prompt), bool(body.get("return_logprob")))
        self.events: asyncio.Queue[dict[str, Any] | EngineError] = asyncio.Queue()
        self.engine: EngineState | None = None
        self.target: EngineState | None = None
        self.moving = False
        self.left = asyncio.Event()
        """Set once the call no longer needs the engine that it is moved away from."""
        self._router = router
        self._body = body
        self._params = dict(body.get("sampling_params") or {})
        self._wanted = int(self._params.get("max_new_tokens", 128))
        self._aborted = asyncio.Event()
        self._attempt: asyncio.Task[dict[str, Any] | None] | None = None
        self._attempt_rid = ""
        self._sent = 0

    # ---- from the router ----

    async def abort(self) -> None:
        """The client wants the end of it."""
        self._aborted.set()
        await self.stop_attempt()

    async def stop_attempt(self) -> None:
        """Ask the engine to end this call; its stream then ends with what it has."""
        if self.engine is not None and self._attempt is not None:
            await self._router.post_abort(self.engine, self._attempt_rid)

    def cut(self) -> None:
        """Hang up on the engine: it is gone, or does not answer. What has arrived is kept."""
        if self._attempt is not None:
            self._attempt.cancel()

    # ---- its own task ----

    async def run(self) -> None:
        """Until the reply is whole. The last thing in `events` has a finish reason or is an error."""
        try:
            finish = await self._whole()
            self._emit(finish)
        except EngineError as error:
            self.events.put_nowait(error)
        finally:
            self._router.release(self)
            self.left.set()

    async def _whole(self) -> dict[str, Any]:
        fruitless = 0
        while True:
            engine = await self._place()
            if engine is None:
                return {**_ABORTED, "message": "Abort in waiting queue"} if not self.joined.attempts else _ABORTED
            if not engine.open:  # it was asked to leave between our getting the place and taking it
                self._router.unreserve(self, engine)
                continue
            had = len(self.joined.ids)
            try:
                finish = await self._on(engine)
            except Refused as error:
                # Trouble of the engine's own: another one may do better. What is wrong with the request stays wrong.
                fruitless = 0 if len(self.joined.ids) > had else fruitless + 1
                if (error.status or 500) < 500 or fruitless > self._router.config.retries:
                    raise
                self._router.failed(engine, str(error))
                finish = None
                await asyncio.sleep(min(2.0, 0.05 * 2**fruitless))
            count = len(self.joined.ids)
            if finish is not None and finish["type"] != "abort":
                return {"type": "length", "length": self._wanted} if finish["type"] == "length" else finish
            if self._aborted.is_set():
                return finish or _ABORTED
            if count >= self._wanted:
                return {"type": "length", "length": self._wanted}
            if finish is not None and not self.moving:
                # Someone else's abort or pause at the engine: go on as soon as it, or another, takes the call.
                fruitless = 0 if count > had else fruitless + 1
                if fruitless > self._router.config.retries:
                    raise Refused(503, f"{engine.name} keeps aborting the call")
                await asyncio.sleep(min(2.0, 0.05 * 2**fruitless))
            await self._leave(engine)

    async def _place(self) -> EngineState | None:
        """A place on an engine; None when the client aborts first."""
        if self.target is not None:
            engine, self.target = self.target, None
            if engine.open:
                return engine
            self._router.unreserve(self, engine)
        if self._aborted.is_set():
            return None
        ids, moved = self.prompt, self.joined.attempts > 0
        engine_now = self._router.place_now(self, ids, moved=moved)
        if engine_now is not None:
            return engine_now
        placing = asyncio.create_task(self._router.place(self, ids, moved=moved))
        aborted = asyncio.create_task(self._aborted.wait())
        try:
            await asyncio.wait({placing, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if placing.done():
                engine = placing.result()
                if not self._aborted.is_set():
                    return engine
                self._router.unreserve(self, engine)
            return None
        finally:
            aborted.cancel()
            if not placing.done():
                placing.cancel()

    async def _on(self, engine: EngineState) -> dict[str, Any] | None:
        """One engine's part. Its finish reason; None when we hung up on it. Raises Refused."""
        self.engine, self.moving = engine, False
        self.left.clear()
        self.joined.begin()
        self._attempt_rid = f"{self.rid}a{self.joined.attempts:02d}."
        self._attempt = asyncio.create_task(self._stream(engine))
        try:
            return await self._attempt
        except asyncio.CancelledError:
            if not self._attempt.cancelled():
                self._attempt.cancel()
                raise
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None
        finally:
            self._attempt = None

    async def _stream(self, engine: EngineState) -> dict[str, Any] | None:
        joined = self.joined
        params = {**self._params, "max_new_tokens": self._wanted - len(joined.ids)}
        body = {
            **self._body,
            "rid": self._attempt_rid,
            "input_ids": [*self.prompt, *joined.ids] if joined.ids else self.prompt,
            "sampling_params": params,
            "stream": True,
        }
        finish: dict[str, Any] | None = None
        try:
            async with self._router.upstream.post(f"{engine.url}/generate", _encode(body)) as (status, lines):
                if status != 200:
                    text = b"\n".join([line async for line in lines]).decode(errors="replace")
                    # A busy engine is the router's problem: it counts as trouble of the engine's.
                    status = 503 if status in (408, 429) else status
                    raise Refused(status, _message(text) or f"{engine.name} answered {status}")
                # To the very end, past the finish: only a connection that was read out is used again.
                async for line in lines:
                    if finish is None and line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                        finish = self._take(decode_event(line[5:]), engine)
            if finish is not None:
                return finish
        except (EngineGoneError, msgspec.MsgspecError) as error:
            if finish is not None:
                return finish
            raise Refused(503, f"{engine.name}: {type(error).__name__} {error}".rstrip()) from error
        raise Refused(503, f"{engine.name} ended its stream without an end")

    def _take(self, event: Event, engine: EngineState) -> dict[str, Any] | None:
        if event.error is not None:
            raise Refused(503, f"{engine.name}: {_message_of(event.error)}")
        try:
            new = self.joined.take(event, engine.name)
        except EngineError as error:
            raise Refused(503, str(error)) from error
        if new and event.meta_info.finish_reason is None:
            self._emit(None)
        return event.meta_info.finish_reason

    def _emit(self, finish: dict[str, Any] | None) -> None:
        name = self.engine.name if self.engine is not None else ""
        self.events.put_nowait(self.joined.event(self.rid, self._sent, name, finish))
        self._sent = len(self.joined.ids)

    async def _leave(self, engine: EngineState) -> None:
        """Give the place up; when a target is reserved, let the keys and values go there first."""
        moved, target = self.moving, self.target
        if moved and target is not None and target.open and engine.version == target.version:
            ids = [*self.prompt, *self.joined.ids]
            with contextlib.suppress(asyncio.TimeoutError):
                await self._router.migrate(engine, target, ids, self._body)
        self._router.unreserve(self, engine)
        self.engine = None
        self.left.set()


def _message(text: str) -> str:
    try:
        return _message_of(msgspec.json.decode(text).get("error"))[:500]
    except (msgspec.DecodeError, AttributeError):
        return text.strip()[:500]


def _message_of(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
