"""Install harnesses by the `install` line of their presets: shipped ones by name, those of harness_examples/ by folder.

    .venv/bin/python scripts/install-harnesses.py [NAME ...]       # all that go into .harness/ when none is named

Versions are pinned in the presets. What is there in the pinned version is not installed again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from gyre_sdk.harness.preset import HarnessPreset, load_preset, preset_names

ROOT = Path(__file__).parents[1]
FOLDER = ".harness/"


def known() -> dict[str, HarnessPreset]:
    """Presets whose installation goes into .harness/."""
    own = sorted((ROOT / "harness_examples").glob("*/preset.toml"))
    found = [load_preset(name) for name in preset_names()] + [load_preset(str(path)) for path in own]
    return {preset.name: preset for preset in found if preset.install_dir.startswith(FOLDER)}


def install(preset: HarnessPreset) -> None:
    """Run the preset's install line, unless the same line was run already."""
    done = ROOT / preset.install_dir / ".installed"
    if done.is_file() and done.read_text() == preset.install:
        return
    tool = preset.install.split()[0]
    if shutil.which(tool) is None:
        sys.exit(f"{preset.name} needs {tool}, which is not installed. Its install line: {preset.install}")
    sys.stdout.write(f"installing {preset.name}, unmodified: {preset.install}\n")
    sys.stdout.flush()
    (ROOT / FOLDER).mkdir(exist_ok=True)
    ran = subprocess.run(preset.install, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{preset.name} could not be installed:\n{(ran.stderr or ran.stdout)[-2000:]}")
    done.write_text(preset.install)


def main() -> None:
    """The command line."""
    presets = known()
    for name in sys.argv[1:] or presets:
        if name not in presets:
            sys.exit(f"no harness {name!r}; known are: {', '.join(presets)}")
        install(presets[name])


if __name__ == "__main__":
    main()
