"""What each CLI calls its tools, and which settings bring it to compact a small conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre_sdk.harness.preset import HarnessPreset, load_preset
from gyre_sdk.testing import Say, ScriptedCall
from tests.harness.real.rig import HELPER_ANSWER, HELPER_TASK, Move

Call = tuple[str, str]


def called(tool: str, **arguments: Any) -> Call:
    """A tool call as a model writes it."""
    return tool, json.dumps(arguments)


@dataclass(frozen=True)
class Cli:
    """One harness as the tests see it."""

    name: str
    shell: Callable[[str], Call]
    """The call that runs a command."""
    helper: Call | None = None
    """The call that starts a subagent; None: it has none."""
    done: Move = "Done."
    """How the model ends the task."""
    helper_done: Move = HELPER_ANSWER
    await_helper: Callable[[ScriptedCall], Say] | None = None
    """The move that waits for a subagent, where starting one returns at once."""
    new_question: bool = False
    """It tells the main agent of a finished subagent in a user message, at which Qwen3's template drops old reasoning."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def preset(self) -> HarnessPreset:
        """The shipped one."""
        found = load_preset(self.name)
        return found.model_copy(update={"env": {**found.env, **self.environment}})

    def run(self, *commands: str, **how: Any) -> Say:
        """A reply that runs commands, all at once."""
        return Say("I do it.", reasoning="It has to be done.", calls=tuple(map(self.shell, commands)), chunk=16, **how)


def _wait_for_agent(call: ScriptedCall) -> Say:
    ids = re.findall(r'"agent_id\\?": ?\\?"([0-9a-f-]{36})', call.prompt)
    return Say("I wait.", calls=(called("wait_agent", targets=ids[-1:], timeout_ms=60000),), chunk=16)


CLIS = {
    cli.name: cli
    for cli in (
        Cli(
            "mini-swe-agent",
            lambda command: called("bash", command=command),
            done=Say("Done.", calls=(called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),), chunk=16),
        ),
        Cli(
            "claude-code",
            # Not in the schema's order: Claude Code sends the keys back in another one.
            lambda command: called("Bash", description="run it", command=command),
            called("Agent", description="look", prompt=HELPER_TASK, subagent_type="general-purpose"),
        ),
        Cli(
            "codex",
            lambda command: called("exec_command", cmd=command),
            called("spawn_agent", message=HELPER_TASK),
            await_helper=_wait_for_agent,
            new_question=True,
        ),
        Cli(
            "qwen-code",
            lambda command: called("run_shell_command", command=command, is_background=False, description="run it"),
            called("agent", description="look", prompt=HELPER_TASK, subagent_type="general-purpose"),
        ),
        Cli(
            "gemini-cli",
            lambda command: called("run_shell_command", command=command),
            called("invoke_agent", agent_name="generalist", prompt=HELPER_TASK),
            helper_done=Say("", calls=(called("complete_task", result={"response": HELPER_ANSWER}),), chunk=16),
        ),
    )
}
