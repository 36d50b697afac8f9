"""Unmodified CLIs that keep working while the gateway is killed under them: in mid-reply, and while a tool runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.capture.wal import read_records
from gyre_sdk.environments import make_sandbox
from gyre_sdk.graph import BranchGraph
from gyre_sdk.harness.agents import AgentContext, CliAgent
from gyre_sdk.serving import GatewayProcess, GatewaySettings
from gyre_sdk.testing import Say, ScriptedCall, ScriptedEngine, ScriptedServer, tiny_model_dir
from gyre_sdk.wire.records import Outcome
from tests.harness.real.clis import CLIS, Cli
from tests.harness.real.rig import ADDED, ROOT, SPECIAL, TASK, _task

pytestmark = [pytest.mark.anyio, pytest.mark.harness, pytest.mark.timeout(300)]


@dataclass
class Steady:
    """Says one move per call of the main agent, slowly; asked to go on with a broken reply, says its rest."""

    moves: Sequence[Say]
    given: dict[str, tuple[Say, int]] = field(default_factory=dict)
    """By call: what it says, and the length of its prompt."""
    used: int = 0

    def __call__(self, call: ScriptedCall) -> Say:
        name = call.request.rid[: len("e000000000000.c000000.")]
        if name not in self.given:
            say = Say('{"title": "A file"}', chunk=16)
            if TASK in call.prompt and ("<tools>" in call.prompt or "bash" in call.prompt):
                say = self.moves[min(self.used, len(self.moves) - 1)]
                self.used += 1
            self.given[name] = say, len(call.input_ids)
        say, start = self.given[name]
        return replace(say, skip=len(call.input_ids) - start)


async def kill_in_mid_reply(engine: ScriptedEngine, gateway: GatewayProcess, kills: int) -> None:
    """Each time another reply of the main agent is half said, and once more while no reply is being made."""
    killed: set[str] = set()
    while len(killed) < kills:
        await anyio.sleep(0.02)
        for entry in list(engine.log):
            name = entry.rid[: len("e000000000000.c000000.")]
            if name not in killed and len(entry.output_ids) > 12 and not entry.finish and gateway.pid:
                killed.add(name)
                os.kill(gateway.pid, signal.SIGKILL)
                await anyio.sleep(1.0)
                break


@pytest.mark.parametrize("name", ["mini-swe-agent", "claude-code", "codex"])
async def test_it_works_on_while_the_gateway_is_killed(tmp_path: Path, name: str) -> None:
    cli: Cli = CLIS[name]
    tiny_model_dir(tmp_path / "model", template=None, special=SPECIAL, added=ADDED)
    renderer = load_renderer(tmp_path / "model", "qwen3")
    slow = {"delay": 0.04}
    end = cli.done if isinstance(cli.done, Say) else Say(str(cli.done), chunk=16)
    moves = [
        replace(cli.run("sleep 1; printf hel > made.txt"), chunk=1, **slow),
        replace(cli.run("printf lo >> made.txt"), chunk=1, **slow),
        end,
    ]
    engine = ScriptedEngine(renderer, Steady(moves))
    task = _task(tmp_path, TASK)
    agent = CliAgent(cli.preset, ROOT / cli.preset.install_dir)
    async with ScriptedServer(engine).serving() as url:
        settings = GatewaySettings(
            run_dir=str(tmp_path / "run"),
            model_dir=str(tmp_path / "model"),
            family="qwen3",
            engine_url=url,
            config=GatewayConfig(partial_every_s=0.1),
        )
        async with GatewayProcess(settings) as gateway:
            opened = await gateway.open(ExecutionSpec(task=task.name, harness=name))
            sandbox = make_sandbox(task, read_only_mounts=agent.mounts())
            await sandbox.start()
            try:
                port = await sandbox.expose(gateway.port)
                await sandbox.exec("git init -q .", cwd=task.workdir, timeout=30)
                context = AgentContext(
                    task=task,
                    instruction=TASK,
                    base_url=f"http://127.0.0.1:{port}",
                    token=opened.token,
                    model="policy",
                    deadline_s=240,
                    log=tmp_path / "harness.log",
                    keep=tmp_path / "kept",
                )
                code = -1
                async with anyio.create_task_group() as group:
                    group.start_soon(kill_in_mid_reply, engine, gateway, 2)
                    with anyio.move_on_after(240):
                        code = await agent.run(sandbox, context)
                    group.cancel_scope.cancel()
                made = await sandbox.exec("cat made.txt", cwd=task.workdir, timeout=30)
            finally:
                await sandbox.stop()
            restarts = gateway.restarts
            await gateway.seal(opened.execution, Outcome(status="completed"))
    records = list(read_records(tmp_path / "run" / "executions" / opened.execution / "wal.gyre"))
    graph = BranchGraph.replay(records)
    resumed = [dict(event.data) for event in graph.events if event.name == "resumed"]
    states = [(call.number, call.state, call.error[:80]) for call in graph.calls.values()]
    said = (tmp_path / "harness.log").read_text(errors="replace")[-3000:]
    told = f"code {code}, restarts {restarts}, resumed {resumed}, calls {states}\n{said}"
    assert code in agent.exit_ok, told
    assert made.stdout == "hello", told
    assert restarts == 2, told
    assert resumed, told
    print(told.splitlines()[0])
    for number, call in graph.calls.items():
        if call.done:
            last = [entry for entry in engine.log if entry.rid.startswith(f"e{opened.execution}.c{number:06d}.")][-1]
            assert graph.path_tokens(number).tolist() == last.input_ids + last.output_ids
