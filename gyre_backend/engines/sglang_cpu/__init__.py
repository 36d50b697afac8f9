"""A real SGLang server without a GPU, in a virtual environment of its own: for tests and for trying things out.

SGLang does not support this; it is evidence for the HTTP contract and the scheduler, not for kernels, numerics or speed.
"""

from gyre_backend.engines.sglang_cpu.install import SGLANG, install, installed
from gyre_backend.engines.sglang_cpu.launch import launch_command, launch_environment

__all__ = ["SGLANG", "install", "installed", "launch_command", "launch_environment"]
