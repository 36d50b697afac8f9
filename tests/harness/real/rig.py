"""A real harness in a loopback-only sandbox, our gateway, and behind it an engine that says what a plan tells it to.

The engine emits tokens of Qwen3's chat template; nothing else is made up: the harness is the unmodified CLI, started by
its preset, and what it sends and does is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from gyre_sdk.capture.config import ExecutionSpec, GatewayConfig
from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.capture.wal import read_records
from gyre_sdk.environments import make_sandbox
from gyre_sdk.environments.task import Environment, Phase, Step, Task, Verifier
from gyre_sdk.errors import HarnessError
from gyre_sdk.graph import BranchGraph
from gyre_sdk.graph.texts import asks_for_summary
from gyre_sdk.harness.agents import AgentContext, CliAgent
from gyre_sdk.harness.preset import HarnessPreset
from gyre_sdk.testing import Fault, Say, ScriptedCall, ScriptedEngine, tiny_model_dir
from gyre_sdk.wire.records import Outcome

ROOT = Path(__file__).parents[3]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TASK = "Create the file made.txt holding the word hello."
HELPER_TASK = "Look through the folder and report which files you can see there."
HELPER_ANSWER = "I looked through the folder; there are no files in it besides the hidden ones."
SUMMARY = f"Summary of the work so far. The user asked: {TASK} Step one is finished, the last step is left to do."

Move = Say | Fault | str | Callable[[ScriptedCall], Say]
"""What is said to one request; of a function, what it makes of the request."""


@dataclass
class Plan:
    """What the model says: one list for the main agent, one for its subagents; every request takes the next entry.

    Who asks is told by the words of the tasks. Summaries and small auxiliary requests are answered by themselves.
    """

    main: Sequence[Move]
    helper: Sequence[Move] = ()
    summary: str = SUMMARY
    seen: list[str] = field(default_factory=list)
    """Who asked, in order: main, helper, summary, aux."""
    prompts: list[str] = field(default_factory=list)

    def __call__(self, call: ScriptedCall) -> Say | Fault:
        who = self._who(call.prompt)
        self.seen.append(who)
        self.prompts.append(call.prompt)
        if who == "summary":
            return Say(f"{self.summary} This is summary number {self.seen.count(who)}.", chunk=16)
        if who == "aux":
            return Say('{"title": "A file", "isNewTopic": true}', chunk=16)
        moves = self.main if who == "main" else self.helper
        number = self.seen.count(who) - 1
        move: Move = moves[number] if number < len(moves) else "That is all."
        if isinstance(move, str):
            return Say(move, chunk=16)
        return move if isinstance(move, Say | Fault) else move(call)

    @staticmethod
    def _who(prompt: str) -> str:
        last_user = prompt.rsplit("<|im_start|>user", 1)[-1]
        if asks_for_summary(last_user) or ("<tools>" not in prompt and asks_for_summary(prompt[:20_000])):
            return "summary"
        if TASK in prompt:
            return "main"
        return "helper" if HELPER_TASK in prompt else "aux"


@dataclass
class Run:
    """What came of it."""

    code: int
    graph: BranchGraph
    plan: Plan
    engine: ScriptedEngine
    log: str
    """The harness's own output."""
    files: dict[str, str]
    """Files of the working directory, by name."""
    rerenders: dict[str, int]

    @property
    def roles(self) -> list[str]:
        """Of the calls that have a reply, in order."""
        return [self.graph.role_of_call(n) for n in sorted(self.graph.calls) if self.graph.calls[n].done]

    @property
    def links(self) -> list[tuple[str, int, int]]:
        """(kind, source call, target call)."""
        return sorted((link.kind, link.source, link.target) for link in self.graph.links())

    def reasons(self) -> list[str]:
        """Why contexts were rendered anew, without a word for those that went on."""
        return [call.rerender for call in self.graph.calls.values() if call.rerender]

    def kinds(self) -> set[str]:
        """Kinds of the links."""
        return {kind for kind, _, _ in self.links}

    def told(self) -> str:
        """All of it for the message of a failing test."""
        lines = [f"exit code {self.code}, files {self.files}, asked by {self.plan.seen}, rerenders {self.rerenders}"]
        for number, call in sorted(self.graph.calls.items()):
            marks = {key: text for key, text in call.marks.items() if key != "system"}
            role = self.graph.role_of_call(number)
            lines.append(
                f"{number} {role} {call.state} base={call.base_call} {call.rerender} {marks} {call.error[:300]}"
            )
        lines += [f"{k.kind} {k.source}->{k.target} {k.reason} inferred={k.inferred}" for k in self.graph.links()]
        return "\n".join([*lines, self.log[-3000:]])


def _task(folder: Path, instruction: str) -> Task:
    step = Step(name="only", instruction=instruction, agent=Phase(), verifier=Verifier(tests=folder), solution=None)
    return Task(name="made", folder=folder, kind="harbor", environment=Environment(), steps=(step,))


async def run(
    preset: HarnessPreset,
    plan: Plan,
    folder: Path,
    *,
    instruction: str = TASK,
    deadline_s: float = 120.0,
    context_length: int = 1_000_000,
    prepare: str = "git init -q .",
    config: GatewayConfig | None = None,
    then: Sequence[HarnessPreset] = (),
) -> Run:
    """Run a preset's CLI once, and `then` others in the same sandbox and execution. Raises HarnessError when one did not
    end by itself."""
    renderer = load_renderer(tiny_model_dir(folder / "model", template=None, special=SPECIAL, added=ADDED), "qwen3")
    engine = ScriptedEngine(renderer, plan, context_length=context_length)
    gateway = Gateway(engine, renderer, folder / "run", config or GatewayConfig(resume_attempts=2))
    agents = [CliAgent(one, ROOT / one.install_dir) for one in (preset, *then)]
    task = _task(folder, instruction)
    async with gateway.serving() as url:
        handle = await gateway.open(ExecutionSpec(task=task.name, harness=preset.name))
        sandbox = make_sandbox(task, read_only_mounts=agents[0].mounts())
        await sandbox.start()
        try:
            port = await sandbox.expose(int(url.rsplit(":", 1)[1]))
            await sandbox.exec(prepare, cwd=task.workdir, timeout=30)
            context = AgentContext(
                task=task,
                instruction=instruction,
                base_url=f"http://127.0.0.1:{port}",
                token=handle.token,
                model="policy",
                deadline_s=deadline_s,
                log=folder / "harness.log",
                keep=folder / "kept",
            )
            code = 0
            for agent in agents:
                if code == 0:
                    code = -1
                    with anyio.move_on_after(deadline_s):
                        code = await agent.run(sandbox, context)
            listed = await sandbox.exec("for f in *; do [ -f $f ] && printf '%s\\t%s\\n' $f \"$(head -c 200 $f)\"; done",
                                        cwd=task.workdir, timeout=30)  # fmt: skip
        finally:
            await sandbox.stop()
        await gateway.seal(handle.execution, Outcome(status="completed"))
    found = Run(
        code=code,
        graph=handle.graph,
        plan=plan,
        engine=engine,
        log=context.log.read_text(errors="replace"),
        files=dict(line.split("\t", 1) for line in listed.stdout.splitlines() if "\t" in line),
        rerenders=handle.recorder.counters.rerenders,
    )
    if code == -1:
        raise HarnessError(f"{preset.name} did not end within {deadline_s:.0f} s\n{found.told()}")
    _check_tokens(found, gateway.wal_path(handle.execution), handle.execution)
    return found


def _check_tokens(found: Run, wal: Path, execution: str) -> None:
    """Every call's tokens are what the engine saw and said, and the log gives the same graph."""
    for number, call in found.graph.calls.items():
        if call.done:
            # A call that was resumed asked the engine more than once; the last request held all before it.
            last = [entry for entry in found.engine.log if entry.rid.startswith(f"e{execution}.c{number:06d}.")][-1]
            assert found.graph.path_tokens(number).tolist() == last.input_ids + last.output_ids
    assert BranchGraph.replay(read_records(wal)).digest() == found.graph.digest()
