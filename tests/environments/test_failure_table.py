"""The failure table of docs/environments.md, row by row, through the runner: graded? valid? whose fault? tried again?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from gyre_sdk.capture.config import ExecutionSpec
from gyre_sdk.capture.flusher import Flusher
from gyre_sdk.capture.wal import Wal
from gyre_sdk.environments import Sandbox, load_task
from gyre_sdk.environments.prepare import TaskSandbox
from gyre_sdk.errors import HarnessError, SandboxError
from gyre_sdk.harness.agents import AgentContext
from gyre_sdk.harness.recording import NoToken
from gyre_sdk.harness.runner import ExecutionOrder, Runner, RunnerSettings
from gyre_sdk.wire.records import Failed, Intent, Opened, Outcome, Result

pytestmark = pytest.mark.anyio
ID = "0" * 11 + "1"
GRADER = "echo run >> /app/graded; test -f done && echo 1 > /logs/verifier/reward.txt || echo 0.25 > /logs/verifier/reward.txt"


class Sealing:
    """Remembers how the execution was sealed."""

    def __init__(self) -> None:
        self.sealed: list[Outcome] = []

    async def open(self, spec: ExecutionSpec) -> NoToken:
        return NoToken()

    async def seal(self, execution: str, outcome: Outcome) -> None:
        self.sealed.append(outcome)


@dataclass
class Scripted:
    """An agent that runs a command inside, then does something out here."""

    command: str = "true"
    code: int = 0
    then: Callable[[Sandbox, AgentContext], Awaitable[None]] | None = None
    needs_model: bool = False
    name: str = "scripted"
    exit_ok: tuple[int, ...] = (0,)
    runs: int = 0

    def mounts(self) -> Mapping[Path, str]:
        return {}

    async def run(self, sandbox: Sandbox, context: AgentContext) -> int:
        self.runs += 1
        await sandbox.exec(self.command)
        if self.then is not None:
            await self.then(sandbox, context)
        return self.code


async def _late(sandbox: Sandbox, context: AgentContext) -> None:
    await asyncio.sleep(30)


async def _no_start(sandbox: Sandbox, context: AgentContext) -> None:
    raise HarnessError("no such program")


async def _kill_the_box(sandbox: Sandbox, context: AgentContext) -> None:
    """As a crash of the machine's own part would: the process that holds the sandbox goes."""
    inner = sandbox.inner  # type: ignore[attr-defined]
    entry = json.loads((inner.folder / "journal.json").read_text())
    for pid in entry["pids"].keys() - {str(entry["owner"])}:
        os.kill(int(pid), signal.SIGKILL)
    await sandbox.exec("true")


def _wal(*, replies: int, failure: str) -> Callable[[Sandbox, AgentContext], Awaitable[None]]:
    """Leaves the log that a gateway would have written of the agent's calls."""

    async def write(sandbox: Sandbox, context: AgentContext) -> None:
        flusher = Flusher(context.log.parent / "journal.gyre")
        wal = Wal.create(context.log.parent / "wal.gyre", flusher)
        await wal.write(Opened(execution=ID, at=time.time()))
        for call in range(replies + bool(failure)):
            await wal.write(Intent(call=call, at=time.time(), dialect="chat"))
            if call < replies:
                ids = np.zeros(1, np.int32).tobytes()
                await wal.write(Result(call=call, at=time.time(), ids=ids, logprobs=ids, versions=(), finish="stop"))
            else:
                await wal.write(Failed(call=call, at=time.time(), error=failure))
        await wal.close()
        await asyncio.to_thread(flusher.close)

    return write


@dataclass(frozen=True)
class Row:
    """One row: what happens, and what must come of it."""

    what: str
    status: str
    reward: float | None
    failure: str | None
    agent: Scripted = field(default_factory=Scripted)
    grader: str = GRADER
    files: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    deadline_s: float | None = None
    attempts: int = 1
    """Runs of the verifier; 0: it is not graded."""
    placeholder: bool = False
    says: str = ""

    @property
    def valid(self) -> bool:
        return self.reward is not None


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
ROWS = [
    Row("ended in time", "completed", 1.0, None, Scripted("touch done")),
    Row("a verified zero", "completed", 0.0, None, grader="echo 0 > /logs/verifier/reward.txt"),
    Row("its deadline", "timeout", 1.0, "agent", Scripted("touch done", then=_late), deadline_s=1.5, says="killed at its deadline"),
    Row("a harness that ends with an error", "harness_error", 1.0, "agent", Scripted("touch done", 3), says="exit code 3"),
    Row("a harness that ends with an error after replies", "harness_error", 0.25, "agent",
        Scripted(code=3, then=_wal(replies=2, failure=""), needs_model=True)),
    Row("a context overflow is the agent's", "harness_error", 0.25, "agent",
        Scripted(code=3, then=_wal(replies=2, failure="ContextOverflowError: too long"), needs_model=True)),
    Row("a harness that can't be started", "harness_error", None, "environment", Scripted("touch done", then=_no_start), attempts=0,
        says="no such program"),
    Row("a harness that ends before its first reply", "harness_error", None, "environment",
        Scripted(code=127, then=_wal(replies=0, failure=""), needs_model=True), attempts=0, says="no reply"),
    Row("a harness that ends because the engine failed", "harness_error", None, "environment",
        Scripted(code=3, then=_wal(replies=2, failure="EngineGoneError: connection refused"), needs_model=True), attempts=0,
        says="connection refused"),
    Row("an agent that broke its sandbox", "completed", 0.0, "agent", Scripted("rm -rf /usr/bin /usr/sbin")),
    Row("an agent that still runs", "completed", 0.25, None,
        Scripted("(trap '' TERM; setsid bash -c 'while :; do touch done; rm done; done' >/dev/null 2>&1 &) ; sleep 0.2"),
        grader=f"rm -f done; sleep 0.3; {GRADER}"),
    Row("a verifier that crashes", "completed", None, "verifier", grader="exit 1", attempts=2, says="neither reward.json nor reward.txt"),
    Row("a verifier that is killed", "completed", None, "verifier", grader="kill -9 $$", attempts=2),
    Row("a verifier that writes no number", "completed", None, "verifier", grader="echo pass > /logs/verifier/reward.txt", attempts=2,
        says="no number"),
    Row("a verifier that writes nothing into it", "completed", None, "verifier", grader=": > /logs/verifier/reward.txt", attempts=2),
    Row("a verifier that writes NaN", "completed", None, "verifier", grader="echo nan > /logs/verifier/reward.txt", attempts=2,
        says="not a number between"),
    Row("a broken reward.json before a good reward.txt", "completed", None, "verifier",
        grader="echo 1 > /logs/verifier/reward.txt; echo { > /logs/verifier/reward.json", attempts=2, says="not JSON"),
    Row("a verifier that runs into its timeout", "completed", None, "verifier", grader="sleep 30",
        config="[verifier]\ntimeout_sec = 1.0\n", attempts=2, says="timeout of 1 s"),
    Row("a deadline, then a verifier that crashes", "timeout", None, "verifier", Scripted(then=_late), grader="exit 1", deadline_s=1.0,
        attempts=2),
    Row("a verifier that works the second time", "completed", 1.0, None, Scripted("touch done"),
        grader=f"test -f /app/again || {{ touch /app/again; exit 1; }}; {GRADER}", attempts=2),
    Row("a sandbox that breaks under the agent", "environment_error", None, "environment", Scripted(then=_kill_the_box), attempts=0),
    Row("a build that fails", "environment_error", None, "environment", attempts=0, placeholder=True, says="ended with 1",
        files={"environment/Dockerfile": "FROM debian:12\nRUN false\n"}),
    Row("a missing image", "environment_error", None, "environment", attempts=0, placeholder=True, says="needs docker or podman",
        config='[environment]\ndocker_image = "example.org/none:1"\n'),
    Row("an environment that never gets healthy", "environment_error", None, "environment", attempts=0, placeholder=True,
        config='[environment.healthcheck]\ncommand = "false"\ninterval_sec = 0.01\nretries = 2\n', says="healthcheck failed 2 times"),
    Row("a separate verifier's environment that can't be built", "environment_error", None, "environment", attempts=0,
        config=SEPARATE, files={"tests/Dockerfile": "FROM debian:12\nRUN exit 7\n"}, says="ended with 7"),
]  # fmt: skip

MORE = {
    "a verifier that is killed",
    "a verifier that writes no number",
    "a verifier that writes nothing into it",
    "a broken reward.json before a good reward.txt",
    "a deadline, then a verifier that crashes",
    "a context overflow is the agent's",
    "an agent that still runs",
    "an environment that never gets healthy",
}
"""Variants of other rows, only in the long run."""


def _runner(row: Row, folder: Path, backend: str, recording: Sealing) -> tuple[Runner, ExecutionOrder]:
    place = folder / "task"
    config = f'schema_version = "1.4"\n{row.config}'
    if "[environment" not in config:
        config += '[environment]\nnetwork_mode = "no-network"\n'
    contents = {"task.toml": config, "instruction.md": "Work.\n", "tests/test.sh": f"#!/bin/bash\n{row.grader}\n"}
    for name, text in (contents | dict(row.files)).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    settings = RunnerSettings(sandbox=backend, deadline_s=row.deadline_s)
    return Runner(recording, 9, row.agent, settings, folder / "run"), ExecutionOrder(ID, "g", load_task(place))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.what, marks=pytest.mark.environments if row.what in MORE else ()) for row in ROWS]
)
async def test_row(row: Row, best: str, tmp_path: Path) -> None:
    row = replace(row, agent=replace(row.agent))
    recording = Sealing()
    runner, order = _runner(row, tmp_path, best, recording)
    outcome = await runner.run(order)
    assert recording.sealed == [outcome], "sealed once, with what is returned"
    assert (outcome.status, outcome.reward, outcome.failure) == (row.status, row.reward, row.failure), outcome
    assert outcome.valid is row.valid
    assert outcome.placeholder is row.placeholder
    assert row.says in outcome.message
    assert outcome.metrics.get("verifier_attempts", 0) == row.attempts


async def test_cancelled_is_no_reward_and_still_sealed(best: str, tmp_path: Path) -> None:
    recording = Sealing()
    runner, order = _runner(Row("", "", None, None, Scripted(then=_late)), tmp_path, best, recording)
    task = asyncio.create_task(runner.run(order))
    for _ in range(500):
        await asyncio.sleep(0.01)
        if runner.agent.runs:  # type: ignore[attr-defined]
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [outcome] = recording.sealed
    assert (outcome.status, outcome.reward, outcome.valid, outcome.failure) == ("cancelled", None, False, None)


async def test_a_start_is_tried_again(best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("", "", None, None, Scripted("touch done"))
    runner, order = _runner(row, tmp_path, best, Sealing())
    starts = 0

    async def start(again: Callable[[], Awaitable[None]]) -> None:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise SandboxError("no room")
        await again()

    real = TaskSandbox.start
    monkeypatch.setattr(TaskSandbox, "start", lambda self: start(lambda: real(self)))
    outcome = await runner.run(order)
    assert (outcome.reward, outcome.valid, starts) == (1.0, True, 2)
