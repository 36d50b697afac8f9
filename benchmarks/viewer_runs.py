"""Runs for looking at: folders as the gateway and the backend write them, made without either.

    python -m benchmarks.viewer_runs FOLDER [--executions N] [--calls N] [--tokens N]

Texts are real (a tiny tokenizer's), requests and replies are recorded, and every kind of edge is there.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gyre_sdk.capture.canonical import Canon
from gyre_sdk.capture.model import Part, Reply, Tool
from gyre_sdk.capture.stored import StoredRequest
from gyre_sdk.testing import tiny_model_dir, tiny_tokenizer
from gyre_sdk.wire import encode, pack_floats, pack_ids
from gyre_sdk.wire.files import file_header
from gyre_sdk.wire.records import (
    Delivered,
    EdgeKind,
    Event,
    Failed,
    Intent,
    Labelled,
    Link,
    Opened,
    Outcome,
    Record,
    Result,
    Role,
    Sealed,
    Span,
)

T0 = 1_790_000_000.0
_SENTENCE = """
the file was created and the tests pass but one assertion in the parser fails when the list is empty so I look at
the function that reads the header and fix the offset by one then run the suite again
"""
WORDS = _SENTENCE.split()
TOOL = Tool("bash", "Run a command", {"type": "object", "properties": {"command": {"type": "string"}}})
_CANON = Canon("default")


def prose(seed: int, words: int) -> str:
    """Some words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Story:
    """Records of one execution, call by call."""

    def __init__(
        self, execution: str, *, task: str = "fix-parser", group: str = "g000000", dialect: str = "chat", at: float = T0,
        deadline_s: float | None = 600.0, engines: Sequence[str] = ("cell0",), version: int = 0,
    ) -> None:  # fmt: skip
        self._tokenizer = tiny_tokenizer()
        self._dialect = dialect
        self._engines = engines
        self._version = version
        self._lengths: list[int] = []
        self._known: set[str] = set()
        self.at = at
        opened = Opened(
            execution=execution, at=at, group=group, task=task, harness="looper", model="policy", deadline_s=deadline_s
        )
        self.records: list[Record] = [opened]
        self.tokens = 0

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def call(
        self, new: Sequence[Part], reply: str, *, base: int = -1, base_reply: bool = True, base_len: int | None = None,
        link: tuple[EdgeKind, int, str] | None = None, role: Role | None = None, rerender: str = "", of: int = -1,
        delivered: bool = True, fail: str = "", pending: bool = False, finish: str = "stop",
    ) -> int:  # fmt: skip
        """Add a call whose prompt is `base`'s context (with its reply unless `base_reply` is off) and `new`."""
        number = len(self._lengths)
        rendered = "".join(f"<|im_start|>{_role(part)}\n{part.text}<|im_end|>\n" for part in new)
        delta = self.ids(rendered + "<|im_start|>assistant\n") if new or base < 0 else []
        length = base_len if base_len is not None else (self._lengths[base] if base >= 0 else 0)
        self.at += 0.4
        stored = StoredRequest(
            base=base if base_len is None else -1,
            reply=base_reply,
            parts=list(new),
            tools=[TOOL] if number == 0 else None,
            tools_digest=_CANON.part(Part("user", "tools")).hex(),
            model="policy",
        )
        self.records.append(
            Intent(
                call=number, at=self.at, dialect=self._dialect, base_call=base, base_len=length, delta=pack_ids(delta),
                sampling={"temperature": 1.0}, marks={"tools": "1"}, rerender=rerender, rerender_of=of,
                request=msgspec.json.encode(stored),
            )
        )  # fmt: skip
        if link is not None:
            self.records.append(Link(kind=link[0], source=link[1], target=number, at=self.at, reason=link[2]))
        if role is not None:
            self.records.append(Labelled(call=number, at=self.at, role=role, reason="as declared"))
        self._answer(number, length + len(delta), len(delta), reply, delivered, fail, pending, finish)
        return number

    def _answer(
        self, number: int, prompt: int, new: int, reply: str, delivered: bool, fail: str, pending: bool, finish: str
    ) -> None:  # fmt: skip
        ids = [] if fail or pending else self.ids(reply + "<|im_end|>")
        self._lengths.append(prompt + len(ids))
        self.tokens += new + len(ids)
        if pending:
            return
        self.at += 0.6 + len(ids) / 400
        if fail:
            self.records.append(Failed(call=number, at=self.at, error=fail))
            return
        surprise = np.abs(np.sin(np.arange(len(ids)) * 1.7 + number)) ** 6 * 5 + 0.01
        half = len(ids) // 2
        spans = (
            (Span(self._version, 0, half), Span(self._version + 1, half, len(ids))) if number % 5 == 4 and half else ()
        )
        self.records.append(
            Result(
                call=number, at=self.at, ids=pack_ids(ids), logprobs=pack_floats(-surprise),
                versions=spans or (Span(self._version, 0, len(ids)),), finish=finish, first_token_at=self.at - 0.3,
                engine=self._engines[(number // 3) % len(self._engines)],
                message=msgspec.json.encode(Reply(reply, prompt_tokens=prompt, output_tokens=len(ids))),
            )
        )  # type: ignore[arg-type]  # fmt: skip
        self.records.append(Delivered(call=number, at=self.at, complete=delivered))

    def seal(
        self, reward: float | None = 1.0, *, valid: bool = True, status: str = "completed", message: str = ""
    ) -> None:
        """End it."""
        self.at += 1.0
        failure = None if valid else "environment"
        outcome = Outcome(status=status, reward=reward, valid=valid, failure=failure, message=message)  # type: ignore[arg-type]
        self.records.append(Sealed(at=self.at, outcome=outcome))

    def write(self, run: Path, upto: int | None = None) -> Path:
        """Its log in a run's folder; of its records only the first `upto`."""
        name = next(record.execution for record in self.records if isinstance(record, Opened))
        path = run / "executions" / name / "wal.gyre"
        path.parent.mkdir(parents=True, exist_ok=True)
        frames = [encode(record, seq) for seq, record in enumerate(self.records[:upto])]
        path.write_bytes(file_header() + b"".join(frames))
        return path


def _role(part: Part) -> str:
    return {"result": "tool", "text": "assistant", "call": "assistant", "reasoning": "assistant"}.get(
        part.kind, part.kind
    )


SYSTEM = Part("system", "You are a careful engineer. Use bash.")


def every_edge(execution: str = "0123456789ab", **options: Any) -> Story:
    """One short execution with each kind of edge, a failed and an undelivered call."""
    story = Story(execution, **options)
    first = story.call([SYSTEM, Part("user", "Fix the parser in parse.py.")], "I look at the file. cat parse.py")
    second = story.call([Part("user", "def parse(): return 0")], "Now I ask a helper about headers.", base=first)
    helper = story.call(
        [Part("system", "You are a helper."), Part("user", "How long is the header?")], "It has 16 bytes.",
        link=("forks", second, "the prompt of a tool call reappears"),
    )  # fmt: skip
    helper = story.call([Part("user", "Are you sure?")], "Yes: magic, version, checksum.", base=helper)
    third = story.call(
        [Part("user", "Yes: magic, version, checksum.")], "I fix the offset. sed -i s/15/16/ parse.py", base=second,
        link=("returns", helper, "the result reappears"), delivered=False,
    )  # fmt: skip
    retry = story.call(
        [], "I fix the offset. sed -i s/15/16/g parse.py", base=third, base_reply=False, base_len=_prompt(story, third),
        link=("retries", third, "same prompt"),
    )  # fmt: skip
    story.call([Part("user", "title?")], "Fix the parser", role="auxiliary")
    story.call([Part("user", "ok")], "", base=retry, fail="the engine is gone: connection reset")
    edited = story.call(
        [SYSTEM, Part("user", "Fix the parser in parse.py, quickly."), Part("text", "I look at the file. cat parse.py")],
        "It reads the header at the wrong place.", rerender="message_edited", of=first,
    )  # fmt: skip
    summary = story.call(
        [Part("user", "Create a detailed summary of the conversation.")], "We fixed the offset in parse.py.",
        base=retry, role="main-summary",
    )  # fmt: skip
    story.call(
        [SYSTEM, Part("user", "We fixed the offset in parse.py. Go on.")], "All tests pass. Done.",
        link=("compacts", summary, "the summary reappears"),
    )  # fmt: skip
    story.records.append(Event(name="limit", at=story.at, data={"limit_name": "calls"}))
    assert edited
    return story


def _prompt(story: Story, call: int) -> int:
    """Length of a call's prompt."""
    result = next(r for r in story.records if isinstance(r, Result) and r.call == call)
    return story._lengths[call] - len(result.ids) // 4


def long_story(execution: str, calls: int, tokens: int, **options: Any) -> Story:
    """An execution of so many calls and about so many unique tokens: retries, subagents, re-renders, compactions."""
    story = Story(execution, deadline_s=None, **options)
    words = max(2, int(tokens / calls / 5.45))
    last = story.call([SYSTEM, Part("user", prose(0, words))], prose(1, words))
    while len(story._lengths) < calls:
        number = len(story._lengths)
        text = Part("user", prose(number, words))
        if number % 50 == 0:
            last = story.call([SYSTEM, text], prose(-number, words), link=("compacts", last, "the summary reappears"))
        elif number % 37 == 0:
            lost = story.call([text], prose(-number, words), base=last, delivered=False)
            link: tuple[EdgeKind, int, str] = ("retries", lost, "same prompt")
            last = story.call(
                [], prose(number + 7, words), base=lost, base_reply=False, base_len=_prompt(story, lost), link=link
            )  # fmt: skip
        elif number % 23 == 0:
            helper = story.call(
                [Part("system", "Help."), text], prose(-number, words), link=("forks", last, "a tool call")
            )
            for step in range(6):
                helper = story.call([Part("user", prose(step, words))], prose(number - step, words), base=helper)
            last = story.call(
                [text], prose(number + 1, words), base=last, link=("returns", helper, "the result reappears")
            )
        elif number % 61 == 0:
            last = story.call([SYSTEM, text], prose(-number, words), rerender="reasoning_dropped", of=last)
        else:
            last = story.call([text], prose(-number, words), base=last)
    return story


def training_files(run: Path, stories: Sequence[Story], *, steps: int = 8, seconds: float = 30.0) -> None:
    """`metrics.jsonl`, `events.jsonl`, `selection.jsonl` and the part of the ledger that is read."""
    end = max(story.at for story in stories)
    begin = min(story.records[0].at for story in stories)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            row = {
                "step": step, "policy_version": step + 1, "at": begin + step * seconds, "loss": 0.3 * 0.8**step - 0.05,
                "reward": 0.2 + 0.6 * (1 - 0.75**step), "staleness": 0.4 + 0.1 * (step % 3), "sharing": 0.55 + 0.02 * (step % 4),
                "grad_norm": 2.0 * 0.9**step, "entropy": 0.6 - 0.02 * step, "seconds": seconds * 0.6,
                "micro_seconds": seconds * 0.3, "micro_steps": 4, "cells": {"cell0": 3, "cell1": 1},
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    moves = []
    for step in range(steps):
        at = begin + (end - begin) * (step + 0.4) / steps
        back = at + (end - begin) * 0.3 / steps
        moves += [(at, "rollout to training", f"cell{step % 2}"), (back, "training to rollout", f"cell{step % 2}")]
    rows = [{"at": at, "event": event, "cell": cell, "seconds": 0.2, "moved": 2} for at, event, cell in sorted(moves)]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (run / "selection.jsonl").open("w") as file:
        groups: dict[str, list[dict[str, Any]]] = {}
        for story in stories:
            group, paths = _selection(story)
            groups.setdefault(group, []).extend(paths)
        file.writelines(
            json.dumps({"group": group, "at": end, "paths": paths}) + "\n" for group, paths in groups.items()
        )
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.execute("CREATE TABLE groups (id TEXT PRIMARY KEY, step INTEGER)")
        db.executemany("INSERT INTO groups VALUES (?, ?)", [(group, 3) for group in sorted(groups)])
        db.commit()


def _selection(story: Story) -> tuple[str, list[dict[str, Any]]]:
    from gyre_sdk.graph import BranchGraph

    graph = BranchGraph.replay(story.records)
    leaves = [leaf for leaf in graph.leaves() if leaf.role == "main" and not leaf.orphan][:2]
    taken = set[int]()
    paths: list[dict[str, Any]] = []
    for leaf in leaves:
        calls = sorted({node.call for node in leaf.nodes if node.call >= 0} - taken)
        taken.update(calls)
        spans = [[call, 0, len(graph.calls[call].output_ids)] for call in calls]
        paths.append({"execution": graph.execution, "leaf": leaf.id, "role": leaf.role, "calls": spans})
    total = sum(end for path in paths for _, _, end in path["calls"])
    for path in paths:
        path |= {"weight": 1 / max(total, 1), "advantage": 0.5}
    return graph.opened.group if graph.opened else "", paths


def make_run(
    run: Path, *, executions: int, kind: str = "train", turns: int = 12, at: float = T0, running: bool = False
) -> list[Story]:
    """A run's folder with so many executions (the first one has every kind of edge), in groups of four, two cells.

    `running`: some have not ended.
    """
    run.mkdir(parents=True, exist_ok=True)
    model = tiny_model_dir(run / "model")
    info = {"kind": kind, "started": at, "model": str(model), "harness": "looper", "tasks": [], "group_size": 4}
    (run / "run.json").write_text(json.dumps(info))
    stories: list[Story] = []
    for i in range(executions):
        options: dict[str, Any] = {
            "group": f"g{i // 4:06d}", "task": ["fix-parser", "write-tests", "port-module"][i // 4 % 3], "version": i // 16,
            "at": at + (i // 4) * 4.0 + i % 4, "engines": ("cell0", "cell1"),
        }  # fmt: skip
        story = every_edge(**options) if i == 0 else long_story(f"{i:012x}", turns, turns * 60, **options)
        if i % 9 == 8:
            story.seal(None, valid=False, status="environment_error", message="the sandbox did not start")
        elif not running or i % 17 != 16:
            story.seal((i % 5) / 4, status="timeout" if i % 13 == 12 else "completed")
        story.write(run)
        stories.append(story)
    return stories


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--executions", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200, help="of one long execution beside the others")
    parser.add_argument("--tokens", type=int, default=60_000, help="of the long execution")
    options = parser.parse_args()
    stories = make_run(options.folder, executions=options.executions)
    long = long_story("fedcba987654", options.calls, options.tokens, engines=("cell0", "cell1"), group="g000001")
    long.seal(0.5)
    long.write(options.folder)
    training_files(options.folder, [*stories, long])
    print(f"{options.folder}: {len(stories) + 1} executions")


if __name__ == "__main__":
    main()
