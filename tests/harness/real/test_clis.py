"""Real, unmodified CLIs through their presets: file made, exit code, roles and edges, with whatever can go wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre_sdk.testing import Fault, Say
from tests.harness.real.clis import CLIS, Cli
from tests.harness.real.rig import Plan, run

pytestmark = [pytest.mark.harness, pytest.mark.anyio, pytest.mark.timeout(400)]
every_cli = pytest.mark.parametrize("cli", CLIS.values(), ids=CLIS.keys())
with_subagents = pytest.mark.parametrize(
    "cli", [cli for cli in CLIS.values() if cli.helper], ids=[name for name, cli in CLIS.items() if cli.helper]
)


@pytest.fixture(autouse=True)
def _needs_root() -> None:
    if os.getuid() != 0:
        pytest.skip("loopback-only sandboxes need root here")


@every_cli
async def test_two_tool_calls_at_once(cli: Cli, tmp_path: Path) -> None:
    plan = Plan([cli.run("echo hello > made.txt", "echo b > b.txt"), cli.run("ls"), cli.done])
    ran = await run(cli.preset, plan, tmp_path)
    assert ran.code == 0, ran.told()
    assert ran.files == {"made.txt": "hello", "b.txt": "b"}, ran.told()
    assert ran.roles == ["main"] * 3, ran.told()
    # One branch: every prompt is the one before it, its reply, and the new messages.
    assert [call.base_call for call in ran.graph.calls.values()] == [-1, 0, 1], ran.told()
    assert len(ran.graph.leaves()) == 1, ran.told()
    assert ran.links == [], ran.told()
    assert ran.reasons() == [], ran.told()
    assert all(call.delivered for call in ran.graph.calls.values()), ran.told()


@every_cli
async def test_a_429_a_500_and_an_engine_killed_in_mid_stream(cli: Cli, tmp_path: Path) -> None:
    third = cli.run("echo 3 > c.txt")
    moves = [
        Fault("overload"),
        cli.run("echo hello > made.txt"),
        Fault("error"),
        cli.run("ls"),
        Fault("gone", after=12, say=third),
        cli.run("echo 3 > c.txt", skip=12),  # the engine is asked to go on; the harness sees nothing of it
        cli.done,
    ]
    ran = await run(cli.preset, Plan(moves), tmp_path)
    assert ran.code == 0, ran.told()
    assert ran.files == {"made.txt": "hello", "c.txt": "3"}, ran.told()
    states = [call.state for _, call in sorted(ran.graph.calls.items())]
    assert states == ["failed", "done", "failed", "done", "done", "done"], ran.told()
    assert ran.roles == ["main"] * 4, ran.told()
    # A failed call leaves no tokens, and its second try is no retry of a reply.
    assert ran.links == [], ran.told()
    assert ran.reasons() == [], ran.told()
    assert len(ran.graph.leaves()) == 1, ran.told()


@every_cli
async def test_an_engine_that_never_comes_back_in_mid_stream(cli: Cli, tmp_path: Path) -> None:
    """The stream is broken, never ended: every one of them asks again."""
    lost = Fault("gone", after=4, say=Say("Now all of it is done and there is no more to do.", chunk=2))
    plan = Plan([cli.run("echo hello > made.txt"), *[lost] * 3, cli.done])
    ran = await run(cli.preset, plan, tmp_path, deadline_s=200)
    assert ran.code == 0, ran.told()
    assert ran.files == {"made.txt": "hello"}, ran.told()
    assert [call.state for _, call in sorted(ran.graph.calls.items())] == ["done", "failed", "done"], ran.told()
    assert "no more to do" not in str(ran.files), ran.told()
    assert len(ran.graph.leaves()) == 1, ran.told()


@with_subagents
async def test_a_subagent(cli: Cli, tmp_path: Path) -> None:
    assert cli.helper is not None
    waits = [cli.await_helper] if cli.await_helper is not None else []
    main = [Say("I ask.", calls=(cli.helper,), chunk=16), *waits, cli.run("echo hello > made.txt"), cli.done]
    ran = await run(cli.preset, Plan(main, helper=[cli.run("ls"), cli.helper_done]), tmp_path)
    assert ran.code == 0, ran.told()
    assert ran.files == {"made.txt": "hello"}, ran.told()
    assert sorted(ran.roles) == ["main"] * len(main) + ["subagent"] * 2, ran.told()
    helpers = [n for n in sorted(ran.graph.calls) if ran.graph.role_of_call(n) == "subagent"]
    forks = [link for link in ran.links if link[0] == "forks"]
    returns = [link for link in ran.links if link[0] == "returns"]
    assert forks == [("forks", 0, helpers[0])], ran.told()
    assert [source for _, source, _ in returns] == [helpers[-1]], ran.told()
    assert ran.reasons() == ["reasoning_dropped"] * cli.new_question, ran.told()
    assert {leaf.role for leaf in ran.graph.leaves()} == {"main", "subagent"}, ran.told()
