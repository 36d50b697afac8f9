"""ATIF documents as executions: records that fold to a branch graph, for everything that reads logs.

Documents of ours come back token for token, with their links and roles. Of other producers' (Harbor's Terminus-2, say)
every step needs `completion_token_ids`, and `prompt_token_ids` with them; branches are found by their tokens. Steps
without token ids can't be placed and are left out, and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from gyre_sdk.capture.model import Part, Reply, ToolCall
from gyre_sdk.capture.stored import StoredRequest
from gyre_sdk.errors import CorruptRecordError, GraphError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Intent, Labelled, Link, Opened, Outcome, Record, Result, Sealed, Span

Json = dict[str, Any]


@dataclass(slots=True)
class Imported:
    """One execution made of documents."""

    execution: str
    """12 hex digits: the session's, when it is such an id, else a hash of it."""
    records: list[Record]
    calls: int = 0
    without_tokens: int = 0
    """Agent steps that were left out, having no token ids."""


@dataclass(slots=True)
class _Step:
    """An agent step, with what stood before it in its document."""

    order: tuple[int, int]
    document: Json
    step: Json
    parts: list[Part]
    base: int
    facts: Json
    """What Gyre wrote of it; empty for other producers' documents."""


@dataclass(slots=True)
class _Session:
    documents: list[Json] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    skipped: int = 0


def from_atif(documents: Iterable[bytes | str]) -> Iterator[Imported]:
    """Executions of these documents (JSON texts), one per `session_id`, in order of appearance.

    Raises CorruptRecordError for what is no ATIF 1.x, or has token ids and logprobs of different lengths.
    """
    sessions: dict[str, _Session] = {}
    for number, text in enumerate(documents):
        document = _read(text, number)
        session = sessions.setdefault(str(document.get("session_id") or f"document {number}"), _Session())
        for one in _with_subagents(document):
            session.documents.append(one)
            _collect(session, one)
    for name, session in sessions.items():
        yield _Importer(name, session).run()


def _read(text: bytes | str, number: int) -> Json:
    try:
        document = msgspec.json.decode(text)
        if not str(document["schema_version"]).startswith("ATIF-v1.") or not isinstance(document["steps"], list):
            raise ValueError(f"schema {document['schema_version']!r}")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CorruptRecordError(f"document {number} is no ATIF 1.x trajectory: {error}") from error
    assert isinstance(document, dict)
    return document


def _with_subagents(document: Json) -> Iterator[Json]:
    yield document
    for child in document.get("subagent_trajectories") or []:
        yield from _with_subagents(child)


def _collect(session: _Session, document: Json) -> None:
    parts: list[Part] = []
    base = -1
    of_no_branch = ((document.get("extra") or {}).get("gyre") or {}).get("steps", [])
    for step in [*document["steps"], *of_no_branch]:
        facts = (step.get("extra") or {}).get("gyre") or {}
        call = int(facts.get("call", -1))
        if step.get("source") in ("system", "user"):
            if message := _text(step.get("message")):
                parts.append(Part(step["source"], message))
        elif step.get("is_copied_context"):
            if call >= 0:
                parts, base = [], call
            else:
                parts.extend(_reply(step).parts())
        elif _tokens(step) is None:
            session.skipped += 1
            parts.extend(_reply(step).parts())
        else:
            order = (call if call >= 0 else 2**31, len(session.steps))
            session.steps.append(_Step(order, document, step, parts, base, facts))
            parts, base = [], call if call >= 0 else -2
        for result in (step.get("observation") or {}).get("results") or []:
            content = _text(result.get("content"))
            if content and not result.get("subagent_trajectory_ref"):
                parts.append(Part("result", content, call_id=str(result.get("source_call_id") or "")))


def _tokens(step: Json) -> list[int] | None:
    metrics = step.get("metrics") or {}
    ids = metrics.get("completion_token_ids")
    placed = "delta_token_ids" in ((step.get("extra") or {}).get("gyre") or {}) or metrics.get("prompt_token_ids")
    return ids if isinstance(ids, list) and placed else None


def _text(content: Any) -> str:
    """A message or an observation as text; parts that are no text are left out."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _reply(step: Json) -> Reply:
    calls = tuple(
        ToolCall(
            str(call.get("tool_call_id", "")), str(call.get("function_name", "")), json.dumps(call.get("arguments"))
        )
        for call in step.get("tool_calls") or []
    )
    finish = "tool_calls" if calls else "stop"
    return Reply(_text(step.get("message")), step.get("reasoning_content") or "", calls, finish)  # type: ignore[arg-type]


class _Importer:
    def __init__(self, session_id: str, session: _Session) -> None:
        hexadecimal = len(session_id) == 12 and all(c in "0123456789abcdef" for c in session_id)
        self.execution = session_id if hexadecimal else hashlib.sha256(session_id.encode()).hexdigest()[:12]
        self.session = session
        self.graph = BranchGraph()
        self.records: list[Record] = []
        self.clock = 0.0
        self.numbers: dict[int, int] = {}
        """Position of a step in its session -> its call's number."""

    def run(self) -> Imported:
        """All records, in an order that folds."""
        first = self.session.documents[0]
        whole = (first.get("extra") or {}).get("gyre") or {}
        times = [at for one in self.session.steps if (at := _time(one.step)) is not None]
        opened_at = float(whole.get("opened_at", min(times, default=0.0)))
        agent = first.get("agent") or {}
        self._add(
            Opened(
                execution=self.execution,
                at=opened_at,
                group=str(whole.get("group", "")),
                task=str(whole.get("task", "")),
                harness=str(agent.get("name", "")),
                model=str(agent.get("model_name") or ""),
                meta={"imported": "ATIF"},
            )
        )
        self.clock = opened_at
        for one in sorted(self.session.steps, key=lambda step: step.order):
            self._call(one)
        for kind, source, target, reason, inferred in whole.get("links", []):
            if kind != "rerenders" and {source, target} <= self.graph.calls.keys():
                self._add(
                    Link(kind=kind, source=source, target=target, at=self.clock, reason=reason, inferred=inferred)
                )
        for call, role, reason in whole.get("labels", []):
            if call in self.graph.calls:
                self._add(Labelled(call=call, at=self.clock, role=role, reason=reason))
        self._add(Sealed(at=self.clock, outcome=_outcome(whole)))
        return Imported(self.execution, self.records, len(self.session.steps), self.session.skipped)

    def _add(self, record: Record) -> None:
        try:
            self.graph.apply(record)
        except (GraphError, msgspec.ValidationError) as error:
            raise CorruptRecordError(f"session {self.execution}: {error}") from error
        self.records.append(record)

    def _call(self, one: _Step) -> None:
        facts, metrics, step = one.facts, one.step.get("metrics") or {}, one.step
        number = one.order[0] if facts else len(self.graph.calls)
        self.numbers[one.order[1]] = number
        ids = np.asarray(metrics["completion_token_ids"], np.int32)
        logprobs = metrics.get("logprobs")
        if logprobs is not None and len(logprobs) != len(ids):
            raise CorruptRecordError(f"step {step.get('step_id')}: {len(ids)} tokens, {len(logprobs)} logprobs")
        # Without logprobs its tokens can be shown, and can't be trained with importance weights.
        values = np.full(len(ids), np.nan, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
        values[values < -3e38] = -np.inf  # JSON has no infinity
        base_call, base_len, delta = self._place(facts, metrics)
        extra = metrics.get("extra") or {}
        at = float(facts.get("at", _time(step) or self.clock))
        done = float(facts.get("done_at") or at)
        base = one.base if one.base != -2 else self.numbers.get(one.order[1] - 1, -1)
        self._add(
            Intent(
                call=number,
                at=at,
                dialect=str(facts.get("dialect", "atif")),
                base_call=base_call,
                base_len=base_len,
                delta=pack_ids(delta),
                sampling=facts.get("sampling", {}),
                rerender=facts.get("rerender", ""),
                rerender_of=facts.get("rerender_of", -1),
                request=msgspec.json.encode(StoredRequest(base=base, parts=list(one.parts))),
            )
        )
        spans = extra.get("policy_versions") or ([[0, 0, len(ids)]] if len(ids) else [])
        self._add(
            Result(
                call=number,
                at=done,
                ids=pack_ids(ids),
                logprobs=pack_floats(values),
                versions=tuple(Span(*span) for span in spans),
                finish=extra.get("finish") or "stop",
                first_token_at=facts.get("first_token_at"),
                cached_tokens=int(metrics.get("cached_tokens") or 0),
                engine=str(facts.get("engine", "")),
                message=msgspec.json.encode(_reply(step)),
            )
        )
        if not facts or extra.get("delivered") is not None:
            self._add(Delivered(call=number, at=done, complete=bool(extra.get("delivered", True))))
        self.clock = max(self.clock, done)

    def _place(self, facts: Json, metrics: Json) -> tuple[int, int, Sequence[int]]:
        """(base call, base length, what the prompt adds)."""
        if "delta_token_ids" in facts:
            return int(facts["base_call"]), int(facts["base_len"]), facts["delta_token_ids"]
        prompt = np.asarray(metrics["prompt_token_ids"], np.int32)
        found = self.graph.resolve(prompt)
        return found.base_call, found.base_len, prompt[found.base_len :].tolist()


def _outcome(whole: Json) -> Outcome:
    if "outcome" in whole:
        return msgspec.convert(whole["outcome"], Outcome)
    return Outcome(status="completed", message="imported without a reward")


def _time(step: Json) -> float | None:
    try:
        return datetime.fromisoformat(str(step["timestamp"]).replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError):
        return None
