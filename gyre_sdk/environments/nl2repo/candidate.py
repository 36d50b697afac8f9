"""What of a candidate's folder is graded: its code, never its tests, its test machinery or its packaging."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

PACKAGING = frozenset(
    {
        "setup.py", "setup.cfg", "pyproject.toml", "requirements.txt", "requirements-dev.txt", "dev-requirements.txt",
        "test-requirements.txt", "requirements-test.txt", "tox.ini", "noxfile.py", "Pipfile", "Pipfile.lock", "poetry.lock",
        "uv.lock", "MANIFEST.in",
    }
)  # fmt: skip
"""Replaced by the hidden ones, as the benchmark does."""
_MACHINERY = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "sitecustomize.py", "usercustomize.py", ".coveragerc"}
)
_SHADOWS = frozenset(
    {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "coverage", "xdist", "py", "gyre_grader"}
)
"""Top-level modules of the verifier's own; a candidate can't stand in for them."""
_plugin = re.compile(r"pytest_.*|.*\.pth|(?:site|user)customize.*|.*\.(?:egg-info|dist-info)")
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", ".git", ".venv", "venv", "node_modules", ".tox", ".pytest_cache", ".mypy_cache"}
)


def select(workspace: Path, target: Path, *, packages: tuple[str, ...], remove: tuple[str, ...]) -> int:
    """Copy what counts from `workspace` to `target`; returns the number of files. Links are left behind."""
    roots = [workspace / path for path in packages] if packages else [workspace]
    wanted_names = {Path(path).parts[0] for path in packages}
    removed = [Path(path.strip("/")) for path in remove]
    copied = 0
    for root in roots:
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            relative = path.relative_to(workspace)
            if path.is_symlink() or not path.is_file() or _dropped(relative, removed, wanted_names):
                continue
            place = target / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            copied += 1
    return copied


def _dropped(path: Path, removed: list[Path], wanted: set[str]) -> bool:
    """Whether a file doesn't count."""
    if any(part in _SKIPPED_FOLDERS or _plugin.fullmatch(part) for part in path.parts):
        return True
    top = path.parts[0].removesuffix(".py")
    if top in _SHADOWS and path.parts[0] not in wanted:
        return True
    if path.name in _MACHINERY or path.name in PACKAGING:
        return True
    return any(path == gone or gone in path.parents for gone in removed)
