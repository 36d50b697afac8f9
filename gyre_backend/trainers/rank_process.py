"""The process of one rank of a trainer: reads operations from its parent, runs them, answers.

What the rank holds is a *replica* (`megatron_replica.Replica`, `fsdp_replica.Replica`): an object with the
operations below as methods. All ranks run each operation at the same time.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
import warnings
from typing import Any

OPERATIONS = frozenset(
    {
        "forward_backward",
        "logprobs",
        "zero_grad",
        "step",
        "share",
        "publish",
        "reload",
        "spill",
        "save",
        "load",
        "peak_memory",
    }
)


def _leave_with_parent() -> None:
    """End this process, even inside a collective, when stdin ends: its parent has closed it or is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _run(replica: Any, op: str, args: tuple[Any, ...]) -> Any:
    if op == "build":
        where, setup = args
        module, name = where.split(":")
        return getattr(importlib.import_module(module), name)(setup)
    if op not in OPERATIONS:
        raise ValueError(f"unknown operation {op!r}")
    return getattr(replica, op)(*args)


def main(handle: int) -> None:
    """Serve the connection `handle` until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    warnings.simplefilter("ignore")  # megatron-core says a dozen times that Transformer Engine is absent
    _leave_with_parent()
    from gyre_backend.trainers.ranks import hear, tell

    link = multiprocessing.connection.Connection(handle)
    replica: Any = None
    while True:
        try:
            op, args = hear(link)
        except EOFError:
            return
        try:
            answer = _run(replica, op, args)
        except Exception as error:  # the border to the parent, which raises it again
            tell(link, (True, _portable(error)))
            continue
        if op == "build":
            replica, answer = answer, None
        tell(link, (False, answer))


def _portable(error: Exception) -> Exception | str:
    """Gyre's own errors travel as they are; of others, their last lines do."""
    from gyre_sdk.errors import GyreError

    if isinstance(error, GyreError):
        return error
    return "".join(traceback.format_exception(error)[-12:]).strip()


if __name__ == "__main__":
    main(int(sys.argv[1]))
