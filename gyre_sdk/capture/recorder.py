"""One execution's calls: resolve, intent, engine, result, delivery. Its graph changes in `Recorder.write` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import anyio.to_thread
import msgspec

from gyre_sdk.capture.canonical import Canon
from gyre_sdk.capture.clock import Clock
from gyre_sdk.capture.config import GatewayConfig, Limits
from gyre_sdk.capture.contexts import Contexts, Conversation, Match
from gyre_sdk.capture.engine_run import EngineRun, Finished
from gyre_sdk.capture.interrupted import due, partial_of
from gyre_sdk.capture.live import LiveCall, merged
from gyre_sdk.capture.marks import Scopes
from gyre_sdk.capture.model import ChatRenderer, Ids, ModelRequest, ParsedReply, Reply, ToolCall
from gyre_sdk.capture.pinned import pinned_sampling, recorded
from gyre_sdk.capture.prompts import Prompt, Prompter, check_length
from gyre_sdk.capture.reading import Reader, ReadRequest
from gyre_sdk.capture.stored import RequestStore, StoredRequest, call_facts, reply_facts
from gyre_sdk.capture.waiting import Waiting
from gyre_sdk.capture.wal import Wal
from gyre_sdk.errors import EngineError, EngineGoneError, GyreError, RequestError, SealedError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.edges import Lineage
from gyre_sdk.graph.folding import check
from gyre_sdk.sampling import ModelInfo, Sampling, TokenClient
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Event, Failed, Intent, Outcome, Record, Result, Sealed

MAX_UNDELIVERED = 32
"""Finished replies of one execution that wait for their retry."""


@dataclass(slots=True)
class Counters:
    """What users want to see of an execution's fidelity and traffic."""

    calls: int = 0
    finished: int = 0
    failed: int = 0
    replayed: int = 0
    rerenders: dict[str, int] = field(default_factory=dict)
    """By reason."""
    prompt_tokens: int = 0
    output_tokens: int = 0


class Recorder:
    """Serves the calls of one execution and records them."""

    def __init__(
        self,
        execution: str,
        wal: Wal,
        graph: BranchGraph,
        renderer: ChatRenderer,
        client: TokenClient,
        info: ModelInfo,
        config: GatewayConfig,
        limits: Limits,
    ) -> None:
        self.execution = execution
        self.graph = graph
        self.config = config
        self.limits = limits
        self.counters = Counters()
        self.live: dict[int, LiveCall] = {}
        """Calls that run, or whose reply was not delivered whole."""
        self.sealed: Outcome | None = None
        self.limit_reached = ""
        """Which cap ended the execution, for its owner."""
        self.renderer = renderer
        self.contexts = Contexts(Canon(config.matcher))
        self.reader = Reader(self.contexts.canon)
        self.store = RequestStore()
        self.lineage = Lineage()
        self.scopes = Scopes()
        self.waiting = Waiting(config.orphan_grace_s, self._abandon)
        self.next_call = 0
        self.now = Clock()
        self._seal_seq: int | None = None
        self._wal = wal
        self._client = client
        self._info = info
        self._version_hint = info.weight_version
        self._prompter = Prompter(renderer, self.contexts, self.reader, self._context_of, self._output_of)

    # -- the one place where things change ---------------------------------------------------------------------

    def write(self, record: Record) -> int:
        """Append a record to the WAL and fold it into the graph. Returns its seq; durable after `durable(seq)`."""
        check(self.graph, record)
        seq = self._wal.append(record)
        self.graph.apply(record)
        return seq

    async def durable(self, seq: int) -> None:
        """Wait until record `seq` is on disk. Raises StorageError."""
        await self._wal.durable(seq)

    # -- a call ------------------------------------------------------------------------------------------------

    async def start(self, request: ModelRequest) -> LiveCall:
        """Accept a request: returns the call to wait for, which may be an earlier one whose reply never arrived.

        The caller counts as one who listens to it, until `detach`. Raises RequestError (also when sealed or over a
        cap) and ContextOverflowError; then nothing was recorded.
        """
        self._check_open()
        read, match = await self._read(request)
        if self.config.replay:
            known = self.waiting.claim(read.key)
            if known is not None:
                self.counters.replayed += 1
                self._answer_again(known)
                return known
        self._check_limits()
        prompt = await self._prompter.make(request, read, match)
        self._check_open()
        check_length(len(prompt.ids), self._info.context_length)
        call = await self._begin(request, read, match, prompt)
        call.task = asyncio.create_task(self._serve(call), name=f"gyre-call-{call.rid}")
        return call

    def _answer_again(self, call: LiveCall) -> None:
        """The retry of an earlier request gets that one's reply; one that a restart cut off goes on from what is on disk."""
        self.note("replay", call=call.number)
        if call.interrupted:
            kept = call.sampled.size
            self.note("resumed", call=call.number, tokens=kept, how="continued" if kept else "resampled")
            call.interrupted, call.version_hint = False, self._version_hint
            call.task = asyncio.create_task(self._serve(call), name=f"gyre-call-{call.rid}")

    def _keep(self, call: LiveCall) -> None:
        """New tokens arrived."""
        if due(call, self.config.partial_every_s):
            self._keep_now(call)

    def _keep_now(self, call: LiveCall) -> None:
        partial = partial_of(call, self.now())
        if partial is not None:
            self.write(partial)

    async def count(self, request: ModelRequest) -> int:
        """Exactly how many prompt tokens the request would have; nothing is recorded."""
        self._check_open()
        read, match = await self._read(request)
        return len((await self._prompter.make(request, read, match)).ids)

    async def _read(self, request: ModelRequest) -> tuple[ReadRequest, Match]:
        heavy = self.reader.is_heavy(request)
        read = await anyio.to_thread.run_sync(self.reader.read, request) if heavy else self.reader.read(request)
        if not read.parts:
            raise RequestError("the request holds no messages")
        return read, self.contexts.match(Conversation(read.keys, read.parts), read.call_ids)

    async def _begin(self, request: ModelRequest, read: ReadRequest, match: Match, prompt: Prompt) -> LiveCall:
        """Write the intent, durably, and know the prompt from now on."""
        number = self.next_call
        self.next_call += 1
        at = self.now()
        base_call, base_len = self._base_of(prompt)
        sampling = self._sampling(request, len(prompt.ids), number)
        new_digests = read.parts[len(read.parts) - len(prompt.new) :]
        marks = self._marks(request, read)
        intent = Intent(
            call=number,
            at=at,
            dialect=request.dialect,
            base_call=base_call,
            base_len=base_len,
            delta=pack_ids(prompt.ids[base_len:]),
            sampling=recorded(sampling),
            marks=marks,
            rerender=prompt.rerender,
            rerender_of=prompt.rerender_of,
            request=msgspec.json.encode(self._stored(request, read, prompt, new_digests)),
        )
        seq = self.write(intent)
        extends = prompt.base_call if prompt.from_reply else -1
        facts = call_facts(
            number,
            at,
            marks,
            prompt.new,
            extends=extends,
            same_prompt=match.same_prompt,
            rerender_of=prompt.rerender_of,
        )
        for record in self.lineage.begin(facts).records:
            seq = self.write(record)
        known = self.contexts.add(number, prompt.start, read.tools_digest, new_digests)
        known.seen_tools = read.tools
        call = LiveCall(number, f"e{self.execution}.c{number:06d}.", prompt.ids, read.tools, self.renderer)
        call.created, call.sampling, call.marks = at, sampling, marks
        call.version_hint, call.prompt_key, call.consumers = self._version_hint, read.key, 1
        self._enter(call, prompt)
        try:
            await self.durable(seq)
        except GyreError as error:
            self._fail(call, error)
            raise
        if call.error is not None:
            raise call.error  # the execution ended meanwhile
        return call

    def _enter(self, call: LiveCall, prompt: Prompt) -> None:
        self.live[call.number] = call
        self.waiting.add(call)
        self.counters.calls += 1
        self.counters.prompt_tokens += call.prompt_tokens
        if prompt.rerender:
            self.counters.rerenders[prompt.rerender] = self.counters.rerenders.get(prompt.rerender, 0) + 1

    def _marks(self, request: ModelRequest, read: ReadRequest) -> dict[str, str]:
        """The request's marks, with what only the recorder knows."""
        marks = {**request.marks, "tools": str(len(read.tools))}
        if request.model:
            marks["model"] = request.model[:128]
        if read.parts and read.parts[0][0] == "s":
            marks["system"] = read.parts[0][1].hex()
        self.scopes.declare(marks)
        return marks

    def _stored(
        self, request: ModelRequest, read: ReadRequest, prompt: Prompt, digests: Sequence[tuple[str, bytes]]
    ) -> StoredRequest:
        parts, tools = self.store.pack(prompt.new, digests, read.tools, read.tools_digest)
        return StoredRequest(
            base=prompt.base_call,
            reply=prompt.from_reply,
            parts=parts,
            tools=tools,
            tools_digest=read.tools_digest.hex(),
            model=request.model,
            stream=request.stream,
        )

    async def _serve(self, call: LiveCall) -> None:
        """Run the engine and commit what it said. Ends with the call done, whatever happens."""
        try:
            if call.first_attempt:
                await self._client.abort(call.rid)  # what an earlier process asked for
            run = EngineRun(self._client, self.config, self.renderer.stop_ids, self._keep, self.now)
            completion = await run.run(call, self.execution)
            await self._commit(call, completion)
        except GyreError as error:
            self._fail(call, error)
        except asyncio.CancelledError:
            if not call.done:
                self._cancelled(call)
            raise
        except Exception as error:  # boundary: whatever broke, the harness must get an answer and the WAL an end
            self._fail(call, EngineError(f"internal error: {type(error).__name__}: {error}"))
            raise
        finally:
            call.prompt = None
            call.tell()

    def _cancelled(self, call: LiveCall) -> None:
        if call.abandoned:
            self._fail(call, EngineError("the client went away and nobody came back for the reply"))
        elif self.sealed is not None:
            self._fail(call, SealedError("the execution has ended; this call was cancelled"))
        else:
            # Another gateway will go on with the execution, and with this call.
            call.error = EngineGoneError("the gateway is stopping")
            self._keep_now(call)

    async def _commit(self, call: LiveCall, completion: Finished) -> None:
        ids = call.sampled.all_ids()
        if call.sampled.versions:
            self._version_hint = call.sampled.versions[-1].version
        if len(ids) > 4096:
            parsed = await anyio.to_thread.run_sync(self.renderer.parse, ids, call.tail, call.tools)
        else:
            parsed = self.renderer.parse(ids, call.tail, call.tools)
        reply = self._reply(call, parsed, completion)
        seq = self.write(
            Result(
                call=call.number,
                at=self.now(),
                ids=pack_ids(ids),
                logprobs=pack_floats(call.sampled.all_logprobs()),
                versions=tuple(merged(call.sampled.versions)),
                finish=completion.finish,
                first_token_at=call.first_token_at,
                cached_tokens=completion.cached_tokens,
                engine=completion.engine,
                message=msgspec.json.encode(reply),
            )
        )
        self.learn_reply(call.number, call.marks, reply, truncated=completion.finish == "length")
        await self.durable(seq)
        self.counters.finished += 1
        self.counters.output_tokens += len(ids)
        call.reply = reply

    def learn_reply(self, number: int, marks: Mapping[str, str], reply: Reply, *, truncated: bool) -> None:
        """A reply is committed: later requests can extend it, and come from it."""
        self.contexts.add_reply(number, reply.parts(), truncated=truncated)
        self.lineage.reply(number, reply_facts(reply.text, [call.arguments for call in reply.calls]))
        self.scopes.finished(marks, number)

    def _reply(self, call: LiveCall, parsed: ParsedReply, completion: Finished) -> Reply:
        calls = tuple(
            ToolCall(
                id=said.id or f"call_{self.execution}_{call.number}_{index}",
                name=said.name,
                arguments=said.arguments,
                raw=said.raw,
            )
            for index, said in enumerate(parsed.calls)
        )
        finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
        return Reply(
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=calls,
            finish="length" if completion.finish == "length" else finish,
            prompt_tokens=call.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            output_tokens=call.sampled.size,
            reasoning_tokens=parsed.reasoning_tokens,
        )

    def _fail(self, call: LiveCall, error: GyreError) -> None:
        """End a call without a reply; it leaves nothing that a later request could extend."""
        self.counters.failed += 1
        sampled = call.sampled
        try:
            if self.graph.calls[call.number].state == "pending":
                self.write(
                    Failed(
                        call=call.number,
                        at=self.now(),
                        error=f"{type(error).__name__}: {error}",
                        ids=pack_ids(sampled.all_ids()),
                        logprobs=pack_floats(sampled.all_logprobs()),
                        versions=sampled.spans(call.version_hint),
                    )
                )
        finally:
            self._drop(call, error)

    def _drop(self, call: LiveCall, error: GyreError) -> None:
        call.error = error
        self._leave(call)
        self.contexts.forget(call.number)
        self.lineage.forget(call.number)
        call.tell()

    def _leave(self, call: LiveCall) -> None:
        self.live.pop(call.number, None)
        self.waiting.remove(call)

    # -- delivery ----------------------------------------------------------------------------------------------

    def detach(self, call: LiveCall, *, complete: bool) -> None:
        """A client got everything (`complete`), or is gone."""
        call.consumers -= 1
        if call.delivered or self.sealed is not None or call.error is not None:
            return
        if complete:
            call.delivered = True
            self.write(Delivered(call=call.number, at=self.now(), complete=True))
            self.contexts.calls[call.number].delivered = True
            self._leave(call)
        elif call.consumers == 0:
            if call.reply is not None:
                self.write(Delivered(call=call.number, at=self.now(), complete=False))
                self._bound_undelivered()
            else:
                self.waiting.left(call)

    def _bound_undelivered(self) -> None:
        """Replies that nobody came back for are not kept for ever: the oldest go first."""
        undelivered = sorted(number for number, call in self.live.items() if call.done and call.consumers == 0)
        for number in undelivered[:-MAX_UNDELIVERED]:
            self._leave(self.live[number])

    def _abandon(self, call: LiveCall) -> None:
        """Nobody came back for the call: stop the engine, keep the partial tokens on record."""
        call.give_up = None
        if call.consumers == 0 and not call.done and call.task is not None:
            call.abandoned = True
            call.task.cancel()

    # -- ends --------------------------------------------------------------------------------------------------

    async def seal(self, outcome: Outcome) -> None:
        """Cancel late calls, write the outcome once, close the WAL. An equal outcome again changes nothing."""
        if self.sealed is not None:
            if self.sealed != outcome:
                raise RequestError(f"execution {self.execution} is sealed already, with another outcome", status=409)
            await self._finish_seal(outcome)
            return
        # As a reader of the log will see it: whole numbers given as rewards or metrics become floats.
        outcome = msgspec.convert(msgspec.to_builtins(outcome), Outcome)
        self.sealed = outcome
        await self.stop()
        for call in list(self.live.values()):
            if call.reply is not None and not call.delivered:
                self.write(Delivered(call=call.number, at=self.now(), complete=False))
            if call.interrupted:
                self._fail(call, SealedError("interrupted by a restart, and nobody came back for the reply"))
            self._leave(call)
        await self._finish_seal(outcome)

    async def _finish_seal(self, outcome: Outcome) -> None:
        """Again when it failed before: on a full disk, say."""
        if self._seal_seq is None:
            self._seal_seq = self.write(Sealed(at=self.now(), outcome=outcome))
        await self.durable(self._seal_seq)
        await self._wal.close()

    async def stop(self) -> None:
        """Cancel running calls. Unless it is sealed, the execution stays open and can be recovered."""
        tasks = [call.task for call in self.live.values() if call.task is not None and not call.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in list(self.live.values()):
            if not call.done and not call.interrupted:
                # Its intent is still on its way to the disk, or its task was cancelled before it ran at all.
                self._cancelled(call)

    async def close(self) -> None:
        """Stop, write what is queued, and let go of the log without sealing it."""
        await self.stop()
        for call in self.live.values():
            if call.give_up is not None:
                call.give_up.cancel()
        await self._wal.close()

    def note(self, name: str, **data: str | float | int | bool) -> None:
        """Put something on the execution's timeline."""
        if self.sealed is None:
            self.write(Event(name=name, at=self.now(), data=data))

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.sealed is not None:
            raise SealedError(f"execution {self.execution} has ended; nothing more is recorded for it", code="sealed")

    def _check_limits(self) -> None:
        busy = sum(1 for call in self.live.values() if not call.done and not call.interrupted)
        if busy >= self.config.max_live_calls:
            raise RequestError(f"{busy} calls of this execution are running already", status=429, code="too_many_calls")
        for name, limit, used in self._usage():
            if limit is not None and used >= limit:
                if not self.limit_reached:
                    self.note("limit", limit_name=name, used=used, limit=limit)
                self.limit_reached = name
                raise RequestError(
                    f"this execution has used its {name} budget ({used} of {limit})", status=403, code="limit_reached"
                )

    def _usage(self) -> Sequence[tuple[str, int | None, int]]:
        limits = self.limits
        return (
            ("turns", limits.turns, self.counters.finished),
            ("tokens", limits.tokens, self.graph.unique_tokens if limits.tokens is not None else 0),
            ("nodes", limits.nodes, len(self.graph.nodes) if limits.nodes is not None else 0),
            ("bytes", limits.bytes, self._wal.durable_offset),
        )

    # -- small things ------------------------------------------------------------------------------------------

    def _base_of(self, prompt: Prompt) -> tuple[int, int]:
        """The longest token-identical path among finished calls, looked for behind what the prompt was made from."""
        base_call, base_len = prompt.base_call, prompt.base_len
        if base_call >= 0 and not self.graph.calls[base_call].done:
            # A prompt shared with a running call: what that one builds on is finished.
            base_call, base_len = self.graph.calls[base_call].base_call, self.graph.calls[base_call].base_len
        found = self.graph.resolve(prompt.ids[base_len:], base_call=base_call, base_len=base_len)
        return found.base_call, found.base_len

    def _context_of(self, call: int, with_output: bool) -> Ids:
        return self.graph.path_tokens(call) if with_output else self.graph.prompt_ids(call)

    def _output_of(self, call: int) -> Ids:
        return self.graph.calls[call].output_ids

    def _sampling(self, request: ModelRequest, prompt_tokens: int, number: int) -> Sampling:
        room = self._info.context_length - prompt_tokens if self._info.context_length else None
        seed = int(self.execution, 16) + number
        return pinned_sampling(self.config.sampling, request.sampling, self.renderer.stop_ids, room, seed)
