"""Two agents that need no model: the task's own solution (`oracle`) and nothing at all (`nop`). They check tasks and graders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_sdk.environments import run_solution
from gyre_sdk.harness.agents import AgentContext

if TYPE_CHECKING:
    from gyre_sdk.environments import Sandbox


class OracleAgent:
    """Runs the solution that comes with the task; a good task then grades 1."""

    name = "oracle"
    needs_model = False
    exit_ok: tuple[int, ...] = (0,)

    def mounts(self) -> Mapping[Path, str]:
        """Nothing."""
        return {}

    async def run(self, sandbox: Sandbox, context: AgentContext) -> int:
        """Exit code of the solution script."""
        return await run_solution(context.task, sandbox, log=context.log)


class NopAgent:
    """Does nothing; a good task then grades 0."""

    name = "nop"
    needs_model = False
    exit_ok: tuple[int, ...] = (0,)

    def mounts(self) -> Mapping[Path, str]:
        """Nothing."""
        return {}

    async def run(self, sandbox: Sandbox, context: AgentContext) -> int:
        """Nothing, at once."""
        return 0
