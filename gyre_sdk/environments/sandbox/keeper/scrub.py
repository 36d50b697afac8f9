"""What can be planted in a sandbox to take over a verifier that runs in it later, found in the layer that holds all that was changed.

Only well-known start-up hooks are looked for: modules that Python imports by itself, path files that run code, the loader's preload
list, test configuration above /tests, settings that redirect package installers, and programs that shadow the system's.
"""

from __future__ import annotations

import os
import re
import stat

_MODULES = re.compile(r"(?:site|user)customize(?:\..*)?$")
_FILES = frozenset(
    {
        "/etc/ld.so.preload",
        "/etc/pip.conf",
        "/etc/xdg/pip/pip.conf",
        "/etc/uv/uv.toml",
        "/etc/bash.bashrc",
        "/etc/environment",
        "/root/.pip/pip.conf",
        "/root/.config/pip/pip.conf",
        "/root/.config/uv/uv.toml",
        "/root/.pydistutils.cfg",
        "/root/.curlrc",
        "/conftest.py",
        "/pytest.ini",
        "/.pytest.ini",
        "/pyproject.toml",
        "/tox.ini",
        "/setup.cfg",
        "/pytest.toml",
        "/.pytest.toml",
    }
)
_SHADOWING = ("/usr/local/bin", "/usr/local/sbin")
_SYSTEM = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
_KNOWN_PATH_LINES = re.compile(
    r"import (?:_virtualenv|__editable__\w+|_distutils_hack)\b"
    r"|import os; var = 'SETUPTOOLS_USE_DISTUTILS'|import sys, types, os;has_mfs"
)
_PATH_FILE_LIMIT = 65_536


def find(upper: str, base: str) -> list[str]:
    """Absolute paths, as the sandbox sees them, of what should go.

    `upper` is the layer with the sandbox's changes, `base` the lowest one.
    """
    found: list[str] = []
    for folder, names, files in os.walk(upper, followlinks=False):
        inside = folder[len(upper) :]
        for name in list(names):
            if _MODULES.match(name):
                found.append(f"{inside}/{name}")
                names.remove(name)
        for name in files:
            path = f"{inside}/{name}"
            if _is_white_out(f"{folder}/{name}"):
                continue
            if (
                path in _FILES
                or _MODULES.match(name)
                or (inside.endswith("__pycache__") and _MODULES.match(name))
                or (
                    name.endswith(".pth")
                    and inside.endswith(("site-packages", "dist-packages"))
                    and _runs_code(f"{folder}/{name}")
                )
                or (
                    inside in _SHADOWING
                    and any(os.path.lexists(f"{base.rstrip('/')}{place}/{name}") for place in _SYSTEM)
                )
            ):
                found.append(path)
    return found


def _is_white_out(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.lstat(path).st_mode)
    except OSError:
        return True


def _runs_code(path: str) -> bool:
    """Whether a path file does more than the known ones of setuptools and virtualenv."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(_PATH_FILE_LIMIT).splitlines()
    except OSError:
        return False
    return any(line.startswith(("import ", "import\t")) and not _KNOWN_PATH_LINES.match(line) for line in lines)
