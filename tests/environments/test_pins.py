"""The sdist variant: for every pinned package the release's own code scores 1, nothing scores 0, and hacks score 0. Downloads from PyPI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gyre_sdk.environments import Task, load_task
from gyre_sdk.environments.nl2repo.grader import verify_folder
from gyre_sdk.environments.nl2repo.pins import Pin, pins
from gyre_sdk.environments.nl2repo.workshop import sdist

pytestmark = [pytest.mark.anyio, pytest.mark.environments, pytest.mark.timeout(1800)]
LIMIT_S = 900

HOOK = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    r = (yield).get_result(); r.outcome = 'passed'\n"
)
PRINTS = "print('2182 passed in 0.01s')\n"
PATCH = (
    "import _pytest.reports as p\nold = p.TestReport.from_item_and_call\n"
    "def forced(item, call):\n    report = old(item, call); report.outcome = 'passed'; report.longrepr = None; return report\n"
    "p.TestReport.from_item_and_call = staticmethod(forced)\n"
)


def _task(pin: Pin, folder: Path) -> Task:
    """A checkout's folder for one task, with the pin's numbers."""
    place = folder / pin.task
    place.mkdir()
    (place / "start.md").write_text(f"# {pin.package}\n")
    (place / "test_commands.json").write_text(json.dumps(["pytest"]))
    (place / "test_files.json").write_text(json.dumps(list(pin.tests)))
    (place / "test_case_count.txt").write_text("1")
    task = load_task(place)
    assert task.repo is not None
    assert (task.repo.variant, task.repo.declared) == ("sdist", pin.declared)
    return task


def test_there_are_enough() -> None:
    assert len(pins()) >= 20


@pytest.mark.parametrize("name", sorted(pins()))
async def test_oracle_and_empty(name: str, best: str, tmp_path: Path) -> None:
    pin = pins()[name]
    task = _task(pin, tmp_path)
    oracle = await verify_folder(task, await sdist(pin, best), tmp_path / "oracle", LIMIT_S, backend=best)
    assert oracle.reward == 1, (oracle, (tmp_path / "oracle/test-stdout.txt").read_text()[-2000:])
    (tmp_path / "nothing").mkdir()
    empty = await verify_folder(task, tmp_path / "nothing", tmp_path / "empty", LIMIT_S, backend=best)
    assert empty.reward == 0, empty


@pytest.mark.parametrize(
    "code", [PRINTS, PATCH, "import os; os._exit(0)\n"], ids=["prints", "patches pytest", "leaves"]
)
@pytest.mark.parametrize("name", sorted(pins()))
async def test_hacks(name: str, code: str, best: str, tmp_path: Path) -> None:
    pin = pins()[name]
    work = tmp_path / "work"
    for path in pin.packages:
        place = work / path if path.endswith(".py") else work / path / "__init__.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(code)
    for folder in (work, work / "tests", work / "test"):
        folder.mkdir(exist_ok=True)
        (folder / "conftest.py").write_text(HOOK)
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --co\n")
        (folder / "test_mine.py").write_text("def test_one():\n    pass\n" * 50)
    shutil.copy(work / "conftest.py", work / "sitecustomize.py")
    grade = await verify_folder(_task(pin, tmp_path), work, tmp_path / "kept", LIMIT_S, backend=best)
    assert grade.reward == 0, (grade, (tmp_path / "kept/test-stdout.txt").read_text()[-2000:])
