"""Going on after a restart: a recorder's knowledge, rebuilt from its log."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre_sdk.capture.clock import Clock
from gyre_sdk.capture.contexts import Point
from gyre_sdk.capture.interrupted import ATTEMPTS_PER_LIFE, lives, revived
from gyre_sdk.capture.live import LiveCall
from gyre_sdk.capture.model import Reply, Tool
from gyre_sdk.capture.recorder import Recorder
from gyre_sdk.capture.stored import StoredRequest, call_facts, read_stored
from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.wire.records import Delivered, Event, Failed, Intent, Labelled, Link, Record, Result, Role


class Recovery:
    """Feeds a recorder with the records of its execution. The graph was replayed before."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._intents: dict[int, Intent] = {}
        self._stored: dict[int, StoredRequest] = {}
        self._results: dict[int, Result] = {}
        self._delivered: set[int] = set()
        self._tools: dict[str, tuple[Tool, ...]] = {"": ()}

    def run(self, records: Sequence[Record]) -> list[int]:
        """Learn all calls. Calls that were running wait, with their partial tokens, for the retry that goes on with them.

        Returns the numbers of the latter. Raises CorruptRecordError for a log of another program.
        """
        self._recorder.now = Clock(max((getattr(record, "at", 0.0) for record in records), default=0.0))
        links = [record for record in records if isinstance(record, Link)]
        labels = {record.call: record.role for record in records if isinstance(record, Labelled)}
        for record in records:
            match record:
                case Intent():
                    self._intent(record, [link for link in links if link.target == record.call], labels)
                case Result():
                    self._result(record)
                case Failed():
                    self._failed(record.call)
                case Delivered() if record.complete:
                    self._delivered.add(record.call)
                    self._recorder.contexts.calls[record.call].delivered = True
        interrupted = [number for number in self._intents if number not in self._results]
        lived = lives([record.name for record in records if isinstance(record, Event)])
        for number in interrupted:
            self._interrupted(number, lived * ATTEMPTS_PER_LIFE)
        self._undelivered()
        return interrupted

    def _intent(self, intent: Intent, links: Sequence[Link], labels: dict[int, Role]) -> None:
        recorder = self._recorder
        stored = read_stored(intent.request)
        digests = stored.digests(recorder.contexts.canon)
        recorder.store.learn(stored, digests)
        if stored.tools is not None:
            self._tools[stored.tools_digest] = tuple(stored.tools)
        tools = bytes.fromhex(stored.tools_digest)
        known = recorder.contexts.add(intent.call, self._start(stored, tools), tools, digests)
        known.seen_tools = self._tools.get(stored.tools_digest, ())
        recorder.next_call = max(recorder.next_call, intent.call + 1)
        recorder.counters.calls += 1
        if intent.rerender:
            rerenders = recorder.counters.rerenders
            rerenders[intent.rerender] = rerenders.get(intent.rerender, 0) + 1
        same = recorder.contexts.same_prompt(known.prompt.key)
        facts = call_facts(
            intent.call,
            intent.at,
            intent.marks,
            stored.known_parts(),
            extends=stored.base if stored.reply else -1,
            same_prompt=same[-2] if len(same) > 1 else -1,
            rerender_of=intent.rerender_of,
        )
        role = labels.get(intent.call) or recorder.graph.role_of_call(intent.call)
        recorder.lineage.restore(facts, role, links)
        recorder.scopes.declare(dict(intent.marks))
        self._intents[intent.call] = intent
        self._stored[intent.call] = stored

    def _start(self, stored: StoredRequest, tools: bytes) -> Point:
        contexts = self._recorder.contexts
        if stored.base < 0:
            return contexts.root(tools)
        base = contexts.calls.get(stored.base)
        if base is None:
            raise CorruptRecordError(f"a call builds on call {stored.base}, which is not in the log")
        return (base.after or base.prompt) if stored.reply else base.prompt

    def _result(self, result: Result) -> None:
        reply = self._reply_of(result)
        self._results[result.call] = result
        marks = self._intents[result.call].marks
        self._recorder.learn_reply(result.call, marks, reply, truncated=result.finish == "length")
        self._recorder.counters.finished += 1

    @staticmethod
    def _reply_of(result: Result) -> Reply:
        try:
            return msgspec.json.decode(result.message, type=Reply)
        except msgspec.MsgspecError as error:
            raise CorruptRecordError(f"the reply of call {result.call} can't be read: {error}") from error

    def _failed(self, number: int) -> None:
        self._recorder.contexts.forget(number)
        self._recorder.lineage.forget(number)
        self._recorder.counters.failed += 1
        self._intents.pop(number, None)

    def _interrupted(self, number: int, first_attempt: int) -> None:
        recorder = self._recorder
        known, graph = recorder.contexts.calls[number], recorder.graph
        rid, prompt = f"e{recorder.execution}.c{number:06d}.", graph.prompt_ids(number)
        call = revived(self._intents[number], graph.calls[number], prompt, known, rid, recorder.renderer)
        call.interrupted, call.first_attempt = True, first_attempt
        recorder.live[number] = call
        recorder.waiting.add(call)

    def _undelivered(self) -> None:
        """Finished replies that nobody got wait for their retry, as before."""
        recorder = self._recorder
        for number, result in self._results.items():
            known = recorder.contexts.calls.get(number)
            if known is None or number in self._delivered or recorder.graph.extended(number):
                continue
            prompt = recorder.graph.prompt_ids(number)
            call = LiveCall(
                number, f"e{recorder.execution}.c{number:06d}.", prompt, known.seen_tools, recorder.renderer
            )
            call.created, call.marks = self._intents[number].at, dict(self._intents[number].marks)
            call.prompt, call.prompt_key, call.reply = None, known.prompt.key, self._reply_of(result)
            recorder.live[number] = call
            recorder.waiting.add(call)
