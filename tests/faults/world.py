"""Eight executions with everything that can die: gateway, ingest, engine and harnesses are processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.model import ChatRenderer
from gyre_sdk.capture.wal import read_records, verify
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.loading import load_graph
from gyre_sdk.graph.nodes import Call
from gyre_sdk.serving import GatewayProcess, GatewaySettings
from gyre_sdk.testing import ScriptedEngine
from gyre_sdk.wire.records import Outcome
from tests.gateway.conftest import make_renderer

ROOT = Path(__file__).parents[2]
Process = asyncio.subprocess.Process


def listening() -> socket.socket:
    """A port that stays ours while processes behind it come and go."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.set_inheritable(True)
    return listener


async def spawn(module: object, *arguments: object, pass_fds: Sequence[int] = (), out: bool = True) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *map(str, (module, *arguments)), cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE if out else None, pass_fds=tuple(pass_fds),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return process


class Service:
    """A process that prints `ready`, and is started anew whenever it dies."""

    def __init__(self, module: str, *arguments: object, pass_fds: Sequence[int] = ()) -> None:
        self.command = (module, *arguments)
        self.pass_fds = pass_fds
        self.process: Process | None = None
        self.pids: list[int] = []
        self.serving = False
        self.watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Service:
        ready = asyncio.Event()
        self.watching = asyncio.create_task(self._watch(ready))
        await ready.wait()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.watching is not None
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)
        if self.process is not None:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
            close(self.process)

    async def _watch(self, ready: asyncio.Event) -> None:
        while True:
            self.process = await spawn(*self.command, pass_fds=self.pass_fds)
            self.pids.append(self.process.pid)
            assert self.process.stdout is not None
            if await self.process.stdout.readline() == b"ready\n":
                ready.set()
                self.serving = True
            await self.process.wait()
            self.serving = False
            close(self.process)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None


def close(process: Process) -> None:
    process._transport.close()  # type: ignore[attr-defined]


@dataclass
class Ended:
    """An execution that was run to its end."""

    execution: str
    journal: Path
    code: int


@dataclass
class World:
    """Runs executions in `slots` and kills what it is told to."""

    folder: Path
    seed: int
    slots: int = 8
    turns: int = 6
    ended: list[Ended] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    pids: list[int] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.renderer: ChatRenderer = make_renderer(self.folder / "model")
        self.engine_log = self.folder / "engine.jsonl"
        self.harnesses: dict[str, Process] = {}
        self.started = 0

    async def run(self, kills: dict[str, int], pause_s: float) -> None:
        """`kills`: how often each of gateway, ingest, engine, harness is killed, in a random order at random moments."""
        engine_listener = listening()
        with listening() as free:
            ingest_port = free.getsockname()[1]
        engine_url = f"http://127.0.0.1:{engine_listener.getsockname()[1]}"
        engine = Service(
            "tests.faults.engine", self.folder / "model", self.engine_log, engine_listener.fileno(), self.seed,
            pass_fds=[engine_listener.fileno()],
        )  # fmt: skip
        ingest = Service("tests.stream.backend", self.folder / "ingest", ingest_port)
        settings = GatewaySettings(
            run_dir=str(self.folder / "run"),
            model_dir=str(self.folder / "model"),
            engine_url=engine_url,
            backend=(f"http://127.0.0.1:{ingest_port}", "x"),
            config=GatewayConfig(partial_every_s=0.05, resume_attempts=8),
        )
        gateway = GatewayProcess(settings)
        with engine_listener:
            async with engine, ingest, gateway:
                self.ports = [ingest_port, gateway.port, engine_listener.getsockname()[1]]
                stop = asyncio.Event()
                running = [asyncio.create_task(self._slot(gateway, stop)) for _ in range(self.slots)]
                try:
                    await self._kill(kills, pause_s, {"gateway": gateway, "ingest": ingest, "engine": engine})
                    stop.set()
                    await asyncio.gather(*running)
                finally:
                    for task in running:
                        task.cancel()
                    await asyncio.gather(*running, return_exceptions=True)
                assert await gateway.drain(60), await gateway.status()
                self.pids += [*engine.pids, *ingest.pids, gateway.pid or 0]

    async def _kill(self, kills: dict[str, int], pause_s: float, services: dict[str, Service | GatewayProcess]) -> None:
        plan = [who for who, count in kills.items() for _ in range(count)]
        self.random.shuffle(plan)
        for who in plan:
            await asyncio.sleep(self.random.random() * 2 * pause_s)
            if who != "harness" and self.random.random() < 0.75:
                # Most die at work; the others at any moment, which is often while they start.
                while not services[who].serving:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                await asyncio.sleep(self.random.random() * 2 * pause_s)
            while not self._shot(self._victim(who, services)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            self.killed[who] += 1

    def _shot(self, pid: int | None) -> bool:
        """False when there is nobody to kill just now; we may not have noticed yet that a process has ended."""
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.pids.append(pid)
            return True
        return False

    def _victim(self, who: str, services: dict[str, Service | GatewayProcess]) -> int | None:
        if who != "harness":
            return services[who].pid
        alive = [process.pid for _, process in sorted(self.harnesses.items()) if process.returncode is None]
        return self.random.choice(alive) if alive else None

    async def _slot(self, gateway: GatewayProcess, stop: asyncio.Event) -> None:
        """One execution after the other; a killed harness ends its execution, as a runner would have it."""
        while not stop.is_set():
            self.started += 1
            number = self.started
            execution = f"{self.seed:06x}{number:06x}"
            opened = await gateway.open(ExecutionSpec(execution=execution, task="t"))
            journal = self.folder / f"{execution}.journal"
            journal.touch()
            harness = await spawn(
                "tests.faults.harness", gateway.port, opened.token, self.turns, journal, number, out=False
            )
            self.harnesses[execution] = harness
            self.pids.append(harness.pid)
            try:
                code = await harness.wait()
            finally:
                if harness.returncode is None:
                    harness.kill()
                    await harness.wait()
                close(harness)
                del self.harnesses[execution]
            status = "completed" if code == 0 else "harness_error"
            await gateway.seal(execution, Outcome(status=status, reward=1.0, valid=True))  # type: ignore[arg-type]
            self.ended.append(Ended(execution, journal, code))

    # -- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing lost, nothing twice, every token as the engine said it, and nothing left behind."""
        requests = self._requests()
        assert self.ended
        for one in self.ended:
            notes = [json.loads(line) for line in one.journal.read_text().splitlines()]
            assert one.code in (0, -signal.SIGKILL), (one, notes[-1:])
            self._check_execution(one.execution, notes, requests, whole=one.code == 0)
        for pid in self.pids:
            assert not alive(pid), pid
        for port in self.ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0

    def _check_execution(
        self, execution: str, notes: list[dict[str, object]], requests: dict[str, list[Request]], *, whole: bool
    ) -> None:
        log = self.folder / "run" / "executions" / execution / "wal.gyre"
        assert verify(log).ok
        graph = BranchGraph.replay(read_records(log))
        taken = load_graph(self.folder / "ingest" / f"{execution}.gyre")
        assert not taken.problem
        assert taken.graph.digest() == graph.digest()
        assert graph.sealed is not None
        assert {call.state for call in graph.calls.values()} <= {"done", "failed"}
        # What the harness acknowledged is there, once, with the words it was told.
        acknowledged = [int(str(note["call"])) for note in notes]
        assert len(set(acknowledged)) == len(acknowledged)
        assert [note["turn"] for note in notes] == list(range(len(notes)))
        assert len(notes) == self.turns or not whole
        for note in notes:
            call = graph.calls[int(str(note["call"]))]
            assert call.done
            assert self.renderer.decode(call.output_ids.tolist()).removesuffix("<|im_end|>") == note["text"]
        # In the order of the turns they are one branch.
        if acknowledged:
            path = [node.call for node in graph.path_nodes(acknowledged[-1]) if node.call >= 0]
            assert list(dict.fromkeys(path)) == acknowledged
        for number, call in graph.calls.items():
            if call.done:
                self._check_tokens(execution, number, call, graph, requests)

    def _check_tokens(
        self, execution: str, number: int, call: Call, graph: BranchGraph, requests: dict[str, list[Request]]
    ) -> None:
        tokens = graph.path_tokens(number).tolist()
        asked = requests.get(f"e{execution}.c{number:06d}.", [])
        assert explained(tokens, call.prompt_tokens, asked), (execution, number)
        said = enumerate(call.output_ids.tolist(), start=call.prompt_tokens)
        expected = [ScriptedEngine.logprob(token, position) for position, token in said]
        assert [round(value, 3) for value in call.logprobs.tolist()] == [round(value, 3) for value in expected]
        assert [(span.start, span.end) for span in call.versions] == ([(0, len(expected))] if expected else [])

    def _requests(self) -> dict[str, list[Request]]:
        """What the engine saw and said, by call."""
        by_rid: dict[str, Request] = {}
        for line in self.engine_log.read_text().splitlines():
            entry = json.loads(line)
            if "input" in entry:
                assert entry["rid"] not in by_rid, "a request id was used twice"
                by_rid[entry["rid"]] = Request(entry["input"])
            else:
                by_rid[entry["rid"]].output += entry["output"]
        found: dict[str, list[Request]] = {}
        for rid, request in by_rid.items():
            found.setdefault(rid[: len("e000000000000.c000000.")], []).append(request)
        return found


@dataclass
class Request:
    """One request in the engine's log."""

    input: list[int]
    output: list[int] = field(default_factory=list)


def explained(tokens: list[int], prompt: int, requests: list[Request]) -> bool:
    """Whether every sampled token was said by the engine at its place, after exactly the tokens before it."""
    if len(tokens) == prompt:
        return True
    for request in requests:
        start = len(request.input)
        if (
            start < len(tokens)
            and tokens[:start] == request.input
            and request.output[: len(tokens) - start] == tokens[start:]
        ):
            return explained(tokens[:start], prompt, requests)
    return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
