"""The helpers of all tests (`forests`) are importable here whatever the rootdir."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
