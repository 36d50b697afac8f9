"""The demo's audit finds what it is there to find: a wrong id, a wrong logprob, a wrong prompt, a reply nobody sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_sdk.cli.audit import against_engine, against_mini
from gyre_sdk.wire import encode, file_header, pack_floats, pack_ids
from gyre_sdk.wire.records import Delivered, Intent, Opened, Record, Result, Span

EXECUTION = "0123456789ab"
PROMPT, OUTPUT, LOGPROBS = [1, 2, 3], [7, 8], [-0.5, -1.25]


def write_run(folder: Path) -> Path:
    """A run with one execution of one call; returns the engine's log that agrees with it."""
    records: list[Record] = [
        Opened(execution=EXECUTION, at=1.0),
        Intent(call=0, at=2.0, dialect="chat", delta=pack_ids(np.asarray(PROMPT, np.int32))),
        Result(
            call=0,
            at=3.0,
            ids=pack_ids(np.asarray(OUTPUT, np.int32)),
            logprobs=pack_floats(np.asarray(LOGPROBS, np.float32)),
            versions=(Span(0, 0, 2),),
            finish="stop",
            message=json.dumps({"text": "hi"}).encode(),
        ),
        Delivered(call=0, at=3.5, complete=True),
    ]
    home = folder / "executions" / EXECUTION
    (home / "harness").mkdir(parents=True)
    data = file_header() + b"".join(encode(record, seq) for seq, record in enumerate(records))
    (home / "wal.gyre").write_bytes(data)
    response = {"choices": [{"message": {"content": "hi"}}], "usage": {"completion_tokens": 2}}
    trajectory = {"messages": [{"role": "assistant", "extra": {"response": response}}]}
    (home / "harness" / "trajectory.json").write_text(json.dumps(trajectory))
    log = folder / "engine.jsonl"
    log.write_text(json.dumps(engine_line()) + "\n")
    return log


def engine_line() -> dict[str, Any]:
    digest = hashlib.sha256(np.asarray(PROMPT, np.int32).tobytes()).hexdigest()
    return {"rid": f"e{EXECUTION}.c000000.", "prompt_sha256": digest, "output_ids": OUTPUT, "logprobs": LOGPROBS}


def test_a_true_record_agrees(tmp_path: Path) -> None:
    log = write_run(tmp_path)
    assert str(against_engine(tmp_path, log)) == "1 calls, 2 tokens: all agree"
    assert str(against_mini(tmp_path)) == "1 calls, 2 tokens: all agree"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda line: line.update(output_ids=[7, 9]), "not the same"),
        (lambda line: line.update(output_ids=[7]), "not the same"),
        (lambda line: line.update(logprobs=[-0.5, -1.2500001]), "logprobs differ"),
        (lambda line: line.update(prompt_sha256="0" * 64), "another prompt"),
        (lambda line: line.update(rid=f"e{EXECUTION}.c000001."), "does not know this call"),
    ],
)
def test_a_false_one_is_found(tmp_path: Path, change: Callable[[dict[str, Any]], None], problem: str) -> None:
    log = write_run(tmp_path)
    line = engine_line()
    change(line)
    log.write_text(json.dumps(line) + "\n")
    audit = against_engine(tmp_path, log)
    assert any(problem in text for text in audit.problems)
    assert "DIFFER" in str(audit)


def test_a_reply_in_pieces_is_put_together(tmp_path: Path) -> None:
    log = write_run(tmp_path)
    first = {**engine_line(), "output_ids": [7], "logprobs": [-0.5]}
    second = {**engine_line(), "rid": f"e{EXECUTION}.c000000.1.", "output_ids": [8], "logprobs": [-1.25]}
    log.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    assert against_engine(tmp_path, log).problems == []


@pytest.mark.parametrize(("content", "tokens", "problem"), [("ho", 2, "the text differs"), ("hi", 3, "3 tokens there")])
def test_a_trajectory_that_differs_is_found(tmp_path: Path, content: str, tokens: int, problem: str) -> None:
    write_run(tmp_path)
    response = {"choices": [{"message": {"content": content}}], "usage": {"completion_tokens": tokens}}
    path = tmp_path / "executions" / EXECUTION / "harness" / "trajectory.json"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "extra": {"response": response}}]}))
    assert any(problem in text for text in against_mini(tmp_path).problems)
