"""An execution as the gateway records it: texts, a tool call, a retry, a subagent, a compaction, a
re-render.
"""

from __future__ import annotations

import msgspec

from gyre_sdk.capture.canonical import Canon
from gyre_sdk.capture.model import Part, Reply, Tool, ToolCall
from gyre_sdk.capture.stored import StoredRequest
from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import pack_floats, pack_ids
from gyre_sdk.wire.records import (
    Delivered,
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

T0 = 1764000000.0
SYSTEM = Part("system", 'You are <helpful> & "careful".')
TASK = Part("user", "Write hello.py; ask a helper.")


def _intent(call: int, base: int, length: int, delta: list[int], stored: StoredRequest, rerender: str = "") -> Intent:
    return Intent(
        call=call,
        at=T0 + call,
        dialect="chat",
        base_call=base,
        base_len=length,
        delta=pack_ids(delta),
        sampling={"temperature": 0.7, "max_new_tokens": 64},
        marks={"agent": "a"},
        rerender=rerender,
        rerender_of=0 if rerender else -1,
        request=msgspec.json.encode(stored),
    )


def _result(call: int, ids: list[int], reply: Reply, finish: str = "stop") -> Result:
    return Result(
        call=call,
        at=T0 + call + 0.5,
        ids=pack_ids(ids),
        logprobs=pack_floats([-0.1 * (i + 1) for i in range(len(ids))]),
        versions=(Span(3, 0, 1), Span(4, 1, len(ids)))[: len(ids)],
        finish=finish,  # type: ignore[arg-type]
        first_token_at=T0 + call + 0.1,
        cached_tokens=2,
        engine="cell-0",
        message=msgspec.json.encode(reply),
    )


def records() -> list[Record]:
    """Calls: 0 asks a helper, 1 is the helper, 2 is lost on the way, 3 its retry, 4 summarises, 5 goes on, 6
    a re-render, 7 fails.
    """
    tool = Tool("task", "Ask a helper", {"type": "object", "properties": {"prompt": {"type": "string"}}})
    ask = ToolCall("t1", "task", '{"prompt": "What is hello in Latin?"}', "<tool_call>...</tool_call>")
    key = Canon("default").part
    return [
        Opened(execution="0123456789ab", at=T0, group="g", task="hello", harness="looper", model="tiny"),
        _intent(
            0, -1, 0, [1, 2, 3], StoredRequest(parts=[SYSTEM, TASK], tools=[tool], tools_digest="aa", model="policy")
        ),
        _result(0, [10, 11, 12], Reply("I ask.", "Let me think", (ask,), "tool_calls")),
        Delivered(call=0, at=T0 + 0.6, complete=True),
        _intent(1, 0, 1, [21, 22], StoredRequest(parts=[Part("user", "What is hello in Latin?")])),
        Link(kind="forks", source=0, target=1, at=T0 + 1, reason="the prompt of a tool call reappears", inferred=True),
        _result(1, [23, 24], Reply("salve")),
        Delivered(call=1, at=T0 + 1.6, complete=True),
        _intent(2, 0, 6, [31], StoredRequest(base=0, parts=[Part("result", "salve", "task", "t1")], tools_digest="aa")),
        Link(kind="returns", source=1, target=2, at=T0 + 2, reason="result reappears", inferred=True),
        _result(2, [32, 33], Reply("lost")),
        Delivered(call=2, at=T0 + 2.6, complete=False),
        _intent(3, 2, 7, [], StoredRequest(base=2, reply=False, tools_digest="aa")),
        Link(kind="retries", source=2, target=3, at=T0 + 3, reason="same prompt"),
        _result(3, [32, 34, 35], Reply("Done: salve."), "length"),
        Delivered(call=3, at=T0 + 3.6, complete=True),
        _intent(4, 3, 10, [41], StoredRequest(base=3, parts=[Part("user", "Summarise.")], tools_digest="aa")),
        Labelled(call=4, at=T0 + 4, role="main-summary", reason="summary instruction"),
        _result(4, [42, 43], Reply("We said salve.")),
        Delivered(call=4, at=T0 + 4.6, complete=True),
        _intent(
            5,
            0,
            2,
            [51, 52],
            StoredRequest(parts=[f"s:{key(SYSTEM).hex()}", Part("user", "We said salve. Go on.")], tools_digest="aa"),
        ),
        Link(kind="compacts", source=4, target=5, at=T0 + 5, reason="summary reappears", inferred=True),
        _result(5, [53, 54], Reply("Finished.")),
        Delivered(call=5, at=T0 + 5.6, complete=True),
        _intent(
            6,
            0,
            4,
            [61, 62],
            StoredRequest(
                parts=[
                    f"s:{key(SYSTEM).hex()}",
                    f"u:{key(TASK).hex()}",
                    Part("text", "I ask, differently."),
                    Part("result", "salve", "task", "unknown"),
                ]
            ),
            rerender="message_edited",
        ),
        _result(6, [63], Reply("Other end.")),
        Delivered(call=6, at=T0 + 6.6, complete=True),
        _intent(7, 6, 7, [71], StoredRequest(base=6, parts=[Part("user", "more")])),
        Failed(call=7, at=T0 + 7.5, error="EngineGoneError: \x1b[31mreset\x1b[0m"),
        Sealed(at=T0 + 9, outcome=Outcome(status="completed", reward=0.5, valid=True, metrics={"tests": 2.0})),
    ]


def example() -> BranchGraph:
    """The graph of `records`, with bodies."""
    return BranchGraph.replay(records(), keep_bodies=True)
