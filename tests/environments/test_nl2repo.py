"""The hardened grader on two tasks of our own in NL2RepoBench's layout."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gyre_sdk.environments import load_task, load_tasks
from gyre_sdk.environments.nl2repo import candidate, junit
from gyre_sdk.environments.nl2repo.grader import verify_folder
from gyre_sdk.errors import TaskError

from .helpers import NOP, ORACLE, play

FIXTURES = Path(__file__).parent / "fixtures" / "nl2repo"
pytestmark = pytest.mark.anyio

WORDBAG_PART = (
    'mkdir wordbag && printf \'class Bag:\\n    def __init__(self, text=""):\\n        self.total = len(text.split())\\n'
    "    def top(self, n):\\n        return []\\n' > wordbag/__init__.py"
)
ROMAN_PART = (
    'mkdir -p src/roman && printf \'class RomanError(ValueError): pass\\ndef to_roman(n):\\n    return {1: "I", 4: "IV"}[n]\\n\''
    " > src/roman/__init__.py"
)
PASSING = "def test_mine():\\n    pass\\n"
HOOK = (
    "import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
    "    r = (yield).get_result(); r.outcome = 'passed'\\n"
)
PATCH = (
    "import _pytest.runner as r, _pytest.reports as p\\nold = p.TestReport.from_item_and_call\\n"
    "def forced(item, call):\\n    report = old(item, call); report.outcome = 'passed'; report.longrepr = None; return report\\n"
    "p.TestReport.from_item_and_call = staticmethod(forced)\\nclass Bag:\\n    def __init__(self, *a): pass\\n"
)
HACKS = {
    "prints": "printf 'print(\"27 passed in 0.1s\")\\n' > conftest.py; mkdir wordbag; "
    " printf 'print(\"27 passed\")\\n' > wordbag/__init__.py",
    "conftest": f"for d in . tests wordbag; do mkdir -p $d; printf \"{HOOK}\" > $d/conftest.py; done; touch wordbag/__init__.py",
    "own tests": f"mkdir -p tests wordbag; for i in 1 2 3 4 5 6 7; do printf '{PASSING}' > tests/test_$i.py; done; "
    f"cp tests/test_1.py tests/test_bag.py; cp tests/test_1.py wordbag/test_x.py; printf '{PASSING}' > wordbag/__init__.py",
    "own configuration": "printf '[pytest]\\naddopts = --co\\npython_functions = *\\n' | tee pytest.ini tox.ini setup.cfg > /dev/null; "
    "mkdir wordbag; echo x=1 > wordbag/__init__.py",
    "own pytest": "mkdir -p pytest _pytest wordbag; printf 'print(\"6 passed\"); raise SystemExit(0)\\n' | tee pytest/__init__.py "
    "pytest/__main__.py _pytest/__init__.py sitecustomize.py usercustomize.py "
    "pytest_evil.py evil.pth > /dev/null; touch wordbag/__init__.py",
    "patches pytest from inside": f"mkdir wordbag; printf \"{PATCH}\" > wordbag/__init__.py",
    "leaves at once": "mkdir wordbag; printf 'import os\\nos._exit(0)\\n' > wordbag/__init__.py",
    "links": "mkdir wordbag; ln -s /etc wordbag/etc; ln -s /solution/files/wordbag/__init__.py wordbag/__init__.py",
}  # fmt: skip


@pytest.mark.parametrize(("name", "part"), [("wordbag", WORDBAG_PART), ("roman", ROMAN_PART)])
async def test_oracle_nop_and_part(name: str, part: str, best: str, tmp_path: Path) -> None:
    task = load_task(FIXTURES / name)
    oracle = await play(task, ORACLE, backend=best, keep=tmp_path)
    assert (oracle.reward, oracle.valid) == (1.0, True), (oracle, (tmp_path / "verifier/test-stdout.txt").read_text())
    nop = await play(task, NOP, backend=best)
    assert (nop.reward, nop.valid) == (0.0, True), nop
    some = await play(task, part, backend=best)
    assert some.reward is not None
    assert 0 < some.reward < 1, some


QUICK = ("conftest", "patches pytest from inside", "own pytest")


@pytest.mark.parametrize(
    "hack", [pytest.param(hack, marks=() if hack in QUICK else pytest.mark.environments) for hack in sorted(HACKS)]
)
async def test_a_hack_scores_nothing(hack: str, best: str, tmp_path: Path) -> None:
    """Straight at the grader, on a folder made outside: what the sandbox adds is tested elsewhere."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    await asyncio.to_thread(subprocess.run, ["bash", "-c", HACKS[hack]], cwd=workspace, check=True)
    grade = await verify_folder(load_task(FIXTURES / "wordbag"), workspace, tmp_path / "kept", 120, backend=best)
    assert grade.reward == 0, (grade, (tmp_path / "kept/test-stdout.txt").read_text())


async def test_a_test_that_hangs_fails_alone(best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = tmp_path / "workspace"
    shutil.copytree(FIXTURES / "wordbag/solution/files", workspace)
    code = workspace / "wordbag/__init__.py"
    code.write_text(
        code.read_text().replace("    def top(self, n):", "    def top(self, n):\n        while n == 5: pass")
    )
    monkeypatch.setenv("GYRE_TEST_LIMIT_S", "2")
    grade = await verify_folder(load_task(FIXTURES / "wordbag"), workspace, tmp_path / "kept", 120, backend=best)
    assert grade.reward == pytest.approx(5 / 6)


def test_only_the_candidates_code_is_taken(tmp_path: Path) -> None:
    for name in (
        "a/code.py",
        "a/conftest.py",
        "setup.py",
        "pytest.py",
        "a/.git/x",
        "tests/t.py",
        "a/x.pth",
        "data/t.json",
        "b.py",
    ):
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text("x")
    (tmp_path / "w/a/link").symlink_to("/etc/passwd")
    candidate.select(tmp_path / "w", tmp_path / "all", packages=(), remove=("tests",))
    assert sorted(str(p.relative_to(tmp_path / "all")) for p in (tmp_path / "all").rglob("*") if p.is_file()) == [
        "a/code.py",
        "b.py",
        "data/t.json",
    ]
    candidate.select(tmp_path / "w", tmp_path / "some", packages=("a",), remove=("tests",))
    assert [p.name for p in (tmp_path / "some").rglob("*") if p.is_file()] == ["code.py"]


def test_reports_are_read_with_suspicion(tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    assert junit.count(report, "c") is None
    report.write_text('<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "b">]><testsuite/>')
    assert junit.count(report, "c") is None
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="s"><skipped/></testcase>'
        '<testcase name="zz"><failure/></testcase></testsuite></testsuites>'
    )
    counted = junit.count(report, "zz")
    assert counted == junit.Counts(passed=1, failed=1, skipped=1, canary_failed=1)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("test_commands.json", "[1]", "must be a list of strings"),
        ("test_files.json", "nope", "can't be read as JSON"),
        ("test_case_count.txt", "many", "must hold one number"),
        ("test_case_count.txt", "0", "can't be graded"),
        ("start.md", "", "is no specification"),
    ],
)
def test_a_malformed_task_names_its_file(tmp_path: Path, file: str, text: str, told: str) -> None:
    folder = tmp_path / "task"
    shutil.copytree(FIXTURES / "wordbag", folder)
    (folder / file).write_text(text)
    with pytest.raises(TaskError, match=told) as caught:
        load_task(folder)
    assert file in str(caught.value)


async def test_a_task_that_needs_its_image_says_so(tmp_path: Path, best: str) -> None:
    folder = tmp_path / "someproject"
    folder.mkdir()
    (folder / "start.md").write_text("# spec\n")
    (folder / "test_commands.json").write_text(json.dumps(["pytest"]))
    (folder / "test_files.json").write_text("[]")
    (folder / "test_case_count.txt").write_text("3")
    [task] = load_tasks(folder)
    assert task.repo is not None
    assert task.repo.variant == "image"
    outcome = await play(task, NOP, backend=best)
    assert (outcome.valid, outcome.failure) == (False, "environment")
    assert "podman" in outcome.message
