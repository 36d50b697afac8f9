"""Makes the virtual environment: a CPU build of torch, pinned packages, sglang, and stand-ins for three CUDA-only imports."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gyre_sdk.errors import ConfigError

SGLANG = "sglang==0.5.23"
TORCH = "torch==2.13.0"
STUBS = {"sgl_kernel": "0.4.10", "torchvision": "0.28.0", "torchaudio": "2.11.0"}
"""Imported by sglang without a guard, useless or broken on a CPU; the version is what it asks for."""


def installed(venv: Path) -> bool:
    """Whether `install` has finished there."""
    return (venv / ".gyre-sglang").is_file()


def install(venv: Path, *, say: Callable[[str], None] = lambda text: None) -> None:
    """About 3 minutes and 2.6 GB; does nothing when it is there already.

    pip takes further arguments from `$PIP_ARGS` (an index with CPU wheels of torch, for example). Raises ConfigError.
    """
    if installed(venv):
        return
    _check_platform()
    say(f"creating {venv}")
    _run([sys.executable, "-m", "venv", str(venv)])
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    pip = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        *extra,
    ]
    say(f"installing {TORCH}")
    _run([*pip, TORCH])
    site = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if "cuda: Optional[str] = None" not in (site / "torch" / "version.py").read_text():
        raise ConfigError("pip chose a CUDA build of torch: name an index with CPU wheels in PIP_ARGS")
    say("installing what sglang imports (1 GB of it triton)")
    _run([*pip, "-r", str(Path(__file__).with_name("requirements.txt"))])
    say(f"installing {SGLANG}")
    _run([*pip, SGLANG])
    for name, version in STUBS.items():
        (site / name).mkdir(exist_ok=True)
        source = Path(__file__).with_name("stub.py.txt").read_text().replace("VERSION", version)
        (site / name / "__init__.py").write_text(source)
    say("trying it")
    probe = "import sglang, torch; from sglang.srt.entrypoints.engine import Engine; assert torch.version.cuda is None"
    _run([str(venv / "bin" / "python"), "-W", "ignore", "-c", probe], {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"})
    (venv / ".gyre-sglang").write_text(SGLANG + "\n")


def _check_platform() -> None:
    libc, version = platform.libc_ver()
    new = libc == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= (2, 34)
    if sys.version_info[:2] != (3, 11) or sys.platform != "linux" or platform.machine() != "x86_64" or not new:
        raise ConfigError("SGLang on a CPU needs CPython 3.11 on Linux x86_64 with glibc 2.34 or newer")


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        what = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no output")
        raise ConfigError(f"{shlex.join(command[:6])} ... failed: {what}")
