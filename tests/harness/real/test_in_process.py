"""Harnesses in this process: the OpenAI Agents SDK, and the example loop of our own."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gyre_sdk
from gyre_sdk.capture.config import GatewayConfig
from gyre_sdk.capture.gateway import Gateway
from gyre_sdk.capture.renderer import load_renderer
from gyre_sdk.testing import Fault, Say, ScriptedEngine, tiny_model_dir
from tests.harness.real.clis import called
from tests.harness.real.rig import ADDED, HELPER_ANSWER, HELPER_TASK, ROOT, SPECIAL, TASK, Move, Plan

pytestmark = [
    pytest.mark.harness,
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.getuid() != 0, reason="sandboxes need root here"),
]
RUN = called("bash", command="echo hello > made.txt && cat made.txt")
FAULTS: list[Move] = [
    Fault("overload"),
    Say("I do it.", reasoning="Now.", calls=(RUN, called("bash", command="ls")), chunk=3),
    Fault("error"),
    Fault("gone", after=7, say=Say("I look again.", calls=(RUN,), chunk=3)),
    Say("I look again.", calls=(RUN,), chunk=3, skip=7),
    "Done.",
]


def example(name: str, module: str) -> ModuleType:
    """The code of an example, as a module."""
    path = ROOT / "harness_examples" / name / f"{module}.py"
    spec = importlib.util.spec_from_file_location(f"example_{module}_{name.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


@asynccontextmanager
async def recorded(folder: Path, plan: Plan) -> AsyncIterator[gyre_sdk.Session]:
    renderer = load_renderer(tiny_model_dir(folder / "model", template=None, special=SPECIAL, added=ADDED), "qwen3")
    gateway = Gateway(ScriptedEngine(renderer, plan), renderer, folder / "run", GatewayConfig(resume_attempts=2))
    async with gateway.serving(), gyre_sdk.session(gateway=gateway) as session:
        yield session


def roles(session: gyre_sdk.Session) -> list[str]:
    graph = session.graph
    return [graph.role_of_call(number) for number in sorted(graph.calls) if graph.calls[number].done]


def links(session: gyre_sdk.Session) -> set[tuple[str, int, int]]:
    return {(link.kind, link.source, link.target) for link in session.graph.links()}


def reasons(session: gyre_sdk.Session) -> list[str]:
    return [call.rerender for call in session.graph.calls.values() if call.rerender]


@pytest.fixture
def loop() -> ModuleType:
    return example("own-loop", "loop")


async def test_own_loop_through_faults(tmp_path: Path, loop: ModuleType) -> None:
    async with recorded(tmp_path, Plan(FAULTS)) as session:
        said = await loop.solve(session, TASK, check="test $(cat made.txt) = hello")
        assert said == "Done."
        assert session.outcome is not None
        assert session.outcome.reward == 1.0
        assert roles(session) == ["main"] * 3
        assert links(session) == set()
        assert reasons(session) == []
        assert len(session.graph.leaves()) == 1


async def test_own_loop_with_two_subagents_at_once_and_a_retry(tmp_path: Path, loop: ModuleType) -> None:
    garbled = Say("I ask.", calls=(("delegate", "{}"),))
    both = Say("I ask.", calls=(called("delegate", task=HELPER_TASK), called("delegate", task=HELPER_TASK + " Again.")))
    helper = [Say("", calls=(called("bash", command="ls"),))] * 2 + [Say(HELPER_ANSWER), Say(HELPER_ANSWER + " Twice.")]
    async with recorded(tmp_path, Plan([garbled, both, "Done."], helper=helper)) as session:
        assert await loop.solve(session, TASK) == "Done."
        assert sorted(roles(session)) == ["main"] * 3 + ["subagent"] * 4
        found = links(session)
        assert ("retries", 0, 1) in found
        assert {(source, target) for kind, source, target in found if kind == "forks"} == {(1, 2), (1, 3)}
        assert len({source for kind, source, _ in found if kind == "returns"}) == 2
        assert reasons(session) == []


async def test_own_loop_compacts(tmp_path: Path, loop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LONGEST", 5)
    step = Say("One more.", calls=(called("bash", command="echo x"),))
    plan = Plan([step, step, Say("The task is half done: one file is there, the other is not."), step, "Done."])
    async with recorded(tmp_path, plan) as session:
        assert await loop.solve(session, TASK) == "Done."
        assert roles(session) == ["main", "main", "main-summary", "main", "main"]
        assert ("compacts", 2, 3) in links(session)


APIS: Sequence[str] = ("responses", "chat")


@pytest.fixture
def solve() -> Callable[..., Any]:
    found: Callable[..., Any] = example("openai-agents", "main").solve
    return found


@pytest.mark.parametrize("api", APIS)
async def test_openai_agents_through_faults(tmp_path: Path, solve: Callable[..., Any], api: str) -> None:
    async with recorded(tmp_path, Plan(FAULTS)) as session:
        assert await solve(session, TASK, api) == "Done."
        assert roles(session) == ["main"] * 3
        assert {kind for kind, _, _ in links(session)} == ({"rerenders"} if api == "chat" else set())
        # In its chat form this SDK drops reasoning when it replays a turn; that is a branch with a reason.
        assert set(reasons(session)) == ({"reasoning_dropped"} if api == "chat" else set())


@pytest.mark.parametrize("api", APIS)
async def test_openai_agents_with_an_agent_as_a_tool(tmp_path: Path, solve: Callable[..., Any], api: str) -> None:
    main = [Say("I ask.", calls=(called("look_around", input=HELPER_TASK),)), Say("", calls=(RUN,)), "Done."]
    plan = Plan(main, helper=[Say("", calls=(called("bash", command="ls"),)), HELPER_ANSWER])
    async with recorded(tmp_path, plan) as session:
        assert await solve(session, TASK, api) == "Done."
        assert roles(session) == ["main", "subagent", "subagent", "main", "main"]
        assert links(session) == {("forks", 0, 1), ("returns", 2, 3)}
        assert reasons(session) == []
