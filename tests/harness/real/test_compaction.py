"""How real CLIs shorten their context, and what becomes of it in the graph. mini-swe-agent never does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gyre_sdk.harness.preset import HarnessPreset
from tests.harness.real.clis import CLIS, Cli
from tests.harness.real.rig import Plan, Run, run

pytestmark = [pytest.mark.harness, pytest.mark.anyio, pytest.mark.timeout(400)]

GEMINI_SETTINGS = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "model": {"compressionThreshold": 0.02}}
QWEN_SETTINGS = {"model": {"chatCompression": {"contextPercentageThreshold": 0.5}}}


def long_work(cli: Cli, steps: int, size: int) -> Plan:
    """A file, some long outputs, and a last file."""
    noise = [cli.run(f"echo {step}; head -c {size} /dev/zero | tr '\\0' 'x'; echo") for step in range(steps)]
    return Plan([cli.run("echo hello > made.txt"), *noise, cli.run("echo end > end.txt"), cli.done])


def with_files(preset: HarnessPreset, files: Mapping[str, str]) -> HarnessPreset:
    return preset.model_copy(update={"files": {**preset.files, **files}})


def with_command(preset: HarnessPreset, *command: str) -> HarnessPreset:
    return preset.model_copy(update={"command": command})


def check(ran: Run, compactions: int = 1, *, drafts: int = 0) -> None:
    """Every summary is one, work goes on from it (but for `drafts`), and only the context that it shortens is left behind."""
    assert ran.code == 0, ran.told()
    assert set(ran.roles) == {"main", "main-summary"}, ran.told()
    summaries = [n for n in sorted(ran.graph.calls) if ran.graph.role_of_call(n) == "main-summary"]
    assert len(summaries) >= compactions, ran.told()
    assert ran.plan.seen.count("summary") == len(summaries), ran.told()
    compacts = [(source, target) for kind, source, target in ran.links if kind == "compacts"]
    assert [source for source, _ in compacts] == summaries[drafts:], ran.told()
    for source, target in compacts:
        assert target > source, ran.told()
        assert ran.graph.role_of_call(target) == "main", ran.told()
        assert f"summary number {summaries.index(source) + 1}." in ran.plan.prompts[target], ran.told()
    assert not ran.kinds() & {"forks", "returns", "retries"}, ran.told()
    # Some ask for the summary without tools, or in a later process with another system prompt: it is said so.
    assert set(ran.reasons()) <= {"tools_changed", "system_changed", "reasoning_dropped"}, ran.told()


async def test_claude_code_when_the_context_is_full(tmp_path: Path) -> None:
    cli = CLIS["claude-code"]
    ran = await run(cli.preset, long_work(cli, 6, 3000), tmp_path, context_length=70_000)
    check(ran)
    assert ran.files == {"made.txt": "hello", "end.txt": "end"}, ran.told()


async def test_claude_code_by_hand(tmp_path: Path) -> None:
    cli = CLIS["claude-code"]
    flags = cli.preset.command[3:]
    again = [with_command(cli.preset, "claude", "-c", "-p", text, *flags) for text in ("/compact", "Do the last step.")]
    plan = Plan([cli.run("echo hello > made.txt"), cli.done, cli.run("echo end > end.txt"), cli.done])
    ran = await run(cli.preset, plan, tmp_path, then=again)
    check(ran)
    assert ran.files == {"made.txt": "hello", "end.txt": "end"}, ran.told()
    assert ran.roles == ["main", "main", "main-summary", "main", "main"], ran.told()


async def test_codex_at_its_token_limit_in_mid_turn(tmp_path: Path) -> None:
    cli = CLIS["codex"]
    config = "model_auto_compact_token_limit = 30000\n" + cli.preset.files["codex/config.toml"]
    ran = await run(with_files(cli.preset, {"codex/config.toml": config}), long_work(cli, 4, 1500), tmp_path)
    check(ran, compactions=2)
    assert ran.files == {"made.txt": "hello", "end.txt": "end"}, ran.told()


async def test_qwen_code_at_a_share_of_its_window(tmp_path: Path) -> None:
    cli = CLIS["qwen-code"]
    preset = with_files(cli.preset, {"home/.qwen/settings.json": json.dumps(QWEN_SETTINGS)})
    ran = await run(preset, long_work(cli, 3, 4000), tmp_path)
    check(ran)
    assert ran.files == {"made.txt": "hello", "end.txt": "end"}, ran.told()


async def test_gemini_cli_when_a_session_is_resumed(tmp_path: Path) -> None:
    """It never compresses within a turn of tool calls: only a user's message is a place to cut."""
    cli = CLIS["gemini-cli"]
    preset = with_files(cli.preset, {"home/.gemini/settings.json": json.dumps(GEMINI_SETTINGS)})
    flags = cli.preset.command[4:]
    again = with_command(preset, "gemini", "--resume", "latest", "-y", "-p", "Do the last step.", *flags)
    plan = Plan([cli.run("echo hello > made.txt"), cli.done, cli.run("echo end > end.txt"), cli.done])
    ran = await run(preset, plan, tmp_path, then=[again])
    check(ran, drafts=1)  # it has its summary checked by a second call
    assert ran.files == {"made.txt": "hello", "end.txt": "end"}, ran.told()
