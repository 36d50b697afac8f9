"""Random executions with a fake engine that remembers what it saw: the truth a branch graph is held
against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import (
    Delivered,
    Event,
    Failed,
    Intent,
    Labelled,
    Link,
    Opened,
    Outcome,
    Record,
    Result,
    Sealed,
    Span,
)


@dataclass(frozen=True)
class Step:
    """One thing a harness does. `pick` chooses among the calls that are possible, `tokens` is what is new,
    `output` the reply.
    """

    kind: str
    pick: int
    tokens: tuple[int, ...]
    output: tuple[int, ...]
    cut: int
    delivered: bool | None
    late: bool
    fails: bool


KINDS = ("turn", "turn", "turn", "retry", "fork", "edit", "compact", "partial", "return", "fresh")
STEP_BYTES = 10


def _step(code: bytes) -> Step:
    # Few different tokens, so that unrelated contexts coincide now and then.
    tokens = tuple(code[2] >> shift & 1 for shift in range(code[3] % 7))
    output = tuple(code[4] >> shift & 1 for shift in range(code[5] % 6))
    return Step(
        kind=KINDS[code[0] % len(KINDS)],
        pick=code[1],
        tokens=tokens,
        output=output,
        cut=code[6],
        delivered=(True, True, True, False, None)[code[7] % 5],
        late=code[8] % 2 == 1,
        fails=code[9] % 8 == 7,
    )


def program_of(data: bytes) -> list[Step]:
    """The program that some bytes stand for."""
    return [_step(data[i : i + STEP_BYTES]) for i in range(0, len(data) - STEP_BYTES + 1, STEP_BYTES)]


# One draw of bytes is far cheaper than a tree of draws, and shrinks as well.
programs = st.binary(min_size=STEP_BYTES, max_size=14 * STEP_BYTES).map(program_of)


@dataclass
class Truth:
    """What the fake engine saw and said, by call."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    records: list[Record] = field(default_factory=list)

    def whole(self, call: int) -> list[int]:
        return self.prompts[call] + self.outputs[call]

    def logprob(self, call: int, index: int) -> np.float32:
        return np.float32(-(call + 1) - index / 100)

    def version(self, call: int, index: int) -> int:
        return call // 3 + (1 if index >= 2 else 0)


class Harness:
    """Runs a program against a graph the way a gateway does: resolve, intent, engine, result, delivery."""

    def __init__(self) -> None:
        self.graph = BranchGraph()
        self.truth = Truth()
        self._late: list[Record] = []
        self._at = 0.0
        self._next = 0
        self.write(Opened(execution="e", at=0.0, task="random"))

    def write(self, record: Record) -> None:
        self.truth.records.append(record)
        self.graph.apply(record)

    def now(self) -> float:
        self._at += 1.0
        return self._at

    def run(self, program: Sequence[Step]) -> Harness:
        for step in program:
            self.step(step)
        self.flush()
        self.write(Sealed(at=self.now(), outcome=Outcome(status="completed", reward=0.5, valid=True)))
        return self

    def flush(self) -> None:
        for record in self._late:
            self.write(record)
        self._late = []

    def step(self, step: Step) -> None:
        done = sorted(c for c, entry in self.graph.calls.items() if entry.done)
        source = done[step.pick % len(done)] if done else -1
        prompt, rerender = self.prompt_of(step, source)
        found = self.graph.resolve(np.array(prompt, np.int32))
        # A base need not be the longest: the fold must bear any.
        shorter = step.cut % 4 if step.cut % 3 == 0 else 0
        found_len = max(0, found.base_len - shorter)
        if step.kind == "retry" and source >= 0 and step.cut % 4 == 1:
            # The same prompt may well get the same reply.
            step = replace(step, output=tuple(self.truth.outputs[source]))
        call = self._next
        self._next += 1
        truth = self.truth
        truth.prompts[call], truth.outputs[call] = prompt, list(step.output)
        if not step.late:
            self.flush()
        self.write(
            Intent(
                call=call,
                at=self.now(),
                dialect="chat",
                base_call=found.base_call if found_len else -1,
                base_len=found_len,
                delta=pack_ids(prompt[found_len:]),
                rerender="message_edited" if rerender else "",
                rerender_of=source if rerender else -1,
            )
        )
        for kind in {"retry": "retries", "fork": "forks", "compact": "compacts", "return": "returns"}.items():
            if step.kind == kind[0] and source >= 0:
                self.write(Link(kind=kind[1], source=source, target=call, at=self.now(), reason="program"))  # type: ignore[arg-type]
        if step.kind == "fresh" and call:
            self.write(Labelled(call=call, at=self.now(), role="auxiliary", reason="program"))
        self._end(call, step)

    def _end(self, call: int, step: Step) -> None:
        """The call's reply, now or (when it is late) after the next call's intent."""
        at, n = self.now(), len(step.output)
        ends: list[Record] = []
        if step.fails:
            self.truth.failed.add(call)
            ends.append(Failed(call=call, at=at, error="engine gone"))
        else:
            cuts = [0, 2, n] if n > 2 else [0, n] if n else []
            spans = [Span(self.truth.version(call, a), a, b) for a, b in pairwise(cuts)]
            logprobs = [self.truth.logprob(call, i) for i in range(n)]
            ends.append(
                Result(
                    call=call,
                    at=at,
                    ids=pack_ids(step.output),
                    logprobs=pack_floats(logprobs),
                    versions=tuple(spans),
                    finish="stop",
                )
            )
            if step.delivered is not None:
                ends.append(Delivered(call=call, at=at + 0.5, complete=step.delivered))
        ends.append(Event(name="tool", at=at, data={"call": call}))
        if step.late:
            self._late.extend(ends)
        else:
            for record in ends:
                self.write(record)

    def prompt_of(self, step: Step, source: int) -> tuple[list[int], bool]:
        """(prompt, whether it is a re-render of the source's context)."""
        new = list(step.tokens)
        if source < 0 or step.kind == "fresh":
            return [9, *new], False
        whole, prompt = self.truth.whole(source), self.truth.prompts[source]
        match step.kind:
            case "turn" | "return":
                return whole + new, False
            case "retry":
                return list(prompt), False
            case "partial":
                return whole[: len(prompt) + step.cut % (len(self.truth.outputs[source]) + 1)] + new, False
            case "edit":
                if not whole:
                    return [9, *new], False
                at = step.cut % len(whole)
                return [*whole[:at], 3 + whole[at], *whole[at + 1 :], *new], True
            case "compact":
                return [*whole[: 1 + step.cut % 2], 7, *new], False
            case _:
                return [9, 8, *new], False
