"""Writes the golden bytes of every record type: `python -m tests.golden.generate`.

The files of an older version are never written again: a reader must read them for ever. When a record gains
an optional field, add an example under a new name; when `VERSION` grows, new files appear beside the old
ones.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyre_sdk.wire import encode, file_header, pack_floats, pack_ids
from gyre_sdk.wire.records import (
    VERSION,
    Delivered,
    Event,
    Failed,
    Intent,
    Labelled,
    Link,
    Opened,
    Outcome,
    Partial,
    Record,
    Result,
    Sealed,
    Span,
)

FOLDER = Path(__file__).parent

IDS = [1, 2, 151643, -1, 2**31 - 1]
LOGPROBS = [0.0, -0.5, -1.25, -100.0, -3.4028234663852886e38]

EXAMPLES: dict[str, Record] = {
    "opened-least": Opened(execution="0123456789ab", at=1764000000.25),
    "opened-full": Opened(
        execution="0123456789ab",
        at=1764000000.25,
        group="g1",
        task="hello-world",
        harness="mini-swe-agent",
        model="SmolLM2-135M",
        deadline_s=120.0,
        meta={"seed": "7", "note": "naïve ☃"},
    ),
    "intent-least": Intent(call=0, at=1.0, dialect="chat"),
    "intent-full": Intent(
        call=3,
        at=2.5,
        dialect="responses",
        base_call=2,
        base_len=17,
        delta=pack_ids(IDS),
        sampling={"temperature": 0.7, "top_k": 40, "ignore_eos": True, "stop": [1, 2, "END"], "name": "x"},
        marks={"agent": "a1", "window": "0"},
        rerender="reasoning_dropped",
        rerender_of=1,
        request=b'{"messages": []}',
    ),
    "partial": Partial(
        call=3, at=2.75, start=2, ids=pack_ids(IDS), logprobs=pack_floats(LOGPROBS), versions=(Span(4, 2, 7),)
    ),
    "result-least": Result(call=0, at=3.0, ids=b"", logprobs=b"", versions=(), finish="abort"),
    "result-full": Result(
        call=3,
        at=3.5,
        ids=pack_ids(IDS),
        logprobs=pack_floats(LOGPROBS),
        versions=(Span(4, 0, 2), Span(5, 2, 5)),
        finish="stop",
        first_token_at=2.6,
        cached_tokens=16,
        engine="cell-1",
        message=b'{"content": "hi"}',
    ),
    "failed-least": Failed(call=4, at=4.0, error="EngineGoneError: connection reset"),
    "failed-full": Failed(
        call=4,
        at=4.0,
        error="EngineGoneError: connection reset",
        ids=pack_ids(IDS),
        logprobs=pack_floats(LOGPROBS),
        versions=(Span(4, 0, 5),),
    ),
    "delivered": Delivered(call=3, at=3.75, complete=True),
    "link": Link(kind="forks", source=1, target=3, at=2.5, reason="prompt reappears", inferred=True),
    "labelled": Labelled(call=3, at=2.5, role="subagent", reason="marked by the harness"),
    "event": Event(name="tool", at=5.0, data={"seconds": 1.5, "count": 2, "ok": True, "name": "bash"}),
    "sealed-least": Sealed(at=9.0, outcome=Outcome(status="timeout")),
    "sealed-full": Sealed(
        at=9.0,
        outcome=Outcome(
            status="completed",
            reward=0.5,
            valid=True,
            failure="verifier",
            message="second try",
            metrics={"tests": 3.0},
            placeholder=True,
        ),
    ),
}


def log_records() -> list[Record]:
    """A whole small log, whose graph's digest is golden too."""
    spans = (Span(4, 0, 2), Span(5, 2, 5))
    return [
        EXAMPLES["opened-full"],
        Intent(call=0, at=1.0, dialect="chat", delta=pack_ids([10, 11, 12])),
        Result(call=0, at=1.5, ids=pack_ids(IDS), logprobs=pack_floats(LOGPROBS), versions=spans, finish="stop"),
        Delivered(call=0, at=1.6, complete=True),
        Intent(call=1, at=2.0, dialect="chat", base_call=0, base_len=6, delta=pack_ids([13])),
        Result(call=1, at=2.5, ids=pack_ids(IDS), logprobs=pack_floats(LOGPROBS), versions=spans, finish="length"),
        Link(kind="forks", source=0, target=1, at=2.0, reason="example"),
        EXAMPLES["sealed-full"],
    ]


def main() -> None:
    """Write what is missing of the current version."""
    folder = FOLDER / f"v{VERSION}"
    folder.mkdir(exist_ok=True)
    files = {f"{name}.frame": encode(record, seq) for seq, (name, record) in enumerate(EXAMPLES.items())}
    files["log.gyre"] = file_header() + b"".join(encode(r, seq) for seq, r in enumerate(log_records()))
    files["log.json"] = msgspec.json.encode(log_records())
    for name, data in files.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
