"""From sealed branch graphs to training paths and advantages.

Pure: no clock, no I/O, no randomness but a passed seed.
"""

from gyre_backend.select.advantages import ExecutionResult, advantages
from gyre_backend.select.paths import TrainPath
from gyre_backend.select.selection import GroupSelection, SelectionConfig, select, select_group

__all__ = [
    "ExecutionResult",
    "GroupSelection",
    "SelectionConfig",
    "TrainPath",
    "advantages",
    "select",
    "select_group",
]
