"""The root command: what exists, and the one place where exceptions become exit codes."""

from __future__ import annotations

import os
import signal
import sys
from importlib.metadata import entry_points, version
from types import FrameType

import cyclopts
from rich.console import Console

from gyre_sdk.errors import GyreError

_COMMANDS = {
    "doctor": ("gyre_sdk.cli.doctor:doctor", "What works on this machine, and what to install for the rest."),
    "demo": ("gyre_sdk.cli.demo:demo", "A real model, harness and sandbox, two training steps, in minutes."),
    "run": ("gyre_sdk.cli.run:run", "Run a harness on tasks and record branch graphs; no training."),
    "train": ("gyre_sdk.cli.train:train", "Train a model on tasks, as a TOML file says."),
    "gateway": ("gyre_sdk.cli.serve_gateway:gateway", "The gateway alone, for harnesses that you start yourself."),
    "graph": ("gyre_sdk.cli.graph:graph", "Print an execution's branch graph in the terminal."),
    "view": ("gyre_sdk.cli.view:view", "Show a run in the browser: executions, branch graphs, tokens; live."),
    "top": ("gyre_sdk.cli.top:top", "Watch a run in the terminal: executions, cells, step, reward, tokens per second."),
    "plot": ("gyre_sdk.cli.plot:plot", "Curves and the timeline of runs, as PNG or SVG."),
    "tasks": ("gyre_sdk.cli.tasks:tasks", "List and check task folders."),
    "runs": ("gyre_sdk.cli.runs:app", "List, measure and remove recorded runs."),
    "wal": ("gyre_sdk.cli.wal:app", "Verify, repair or print a write-ahead log."),
    "export": ("gyre_sdk.cli.export:export", "Export executions: GraphML, DOT, JSON, ATIF, Parquet, samples."),
    "import": ("gyre_sdk.cli.importing:import_", "Bring executions into a run: of ATIF documents, or of other runs."),
    "verify-template": (
        "gyre_sdk.cli.verify_template:verify_template",
        "Prove that a model's chat template extends turns token for token.",
    ),
}

_OTHERS = {
    "serve": "The backend of a run as a service of its own.",
    "sim": "Simulate a cluster: one run with its role timeline, or a sweep.",
    "forecast": "Which scheduler, cells and limits would suit a recorded workload.",
}
"""What is said of the backend's commands, which are imported only when they are used."""


def make_app() -> cyclopts.App:
    """The `gyre` app. Commands are imported when they are used; the backend's are found by entry point."""
    app = cyclopts.App(
        name="gyre",
        help="Gyre trains LLM agents with RL, around the harness they already run in.",
        version=lambda: version("gyre"),
        result_action="return_value",
    )
    for name, (target, text) in _COMMANDS.items():
        app.command(target, name=name, help=text)
    for entry in sorted(entry_points(group="gyre.commands"), key=lambda e: e.name):
        app.command(entry.value, name=entry.name, help=_OTHERS.get(entry.name))
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point. A user's mistake is one line on stderr and exit code 2; Ctrl-C is 130; a command may return its own code."""
    # A shell that starts us in the background has SIGINT ignored; then neither signal would end us in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    error_console = Console(stderr=True, highlight=False)
    try:
        code = make_app()(argv)
    except (GyreError, ExceptionGroup) as error:
        first = _first(error)
        if first is None or os.environ.get("GYRE_DEBUG"):
            raise
        error_console.print(f"[bold red]error:[/] {_escape(str(first))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        error_console.print("interrupted; what was recorded is kept", style="yellow")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _first(error: Exception) -> GyreError | None:
    """What to tell the user: our own error, also when task groups have wrapped it; None when a bug is among them."""
    if isinstance(error, ExceptionGroup):
        found = [_first(inner) for inner in error.exceptions]
        return None if None in found else found[0]
    return error if isinstance(error, GyreError) else None


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends like Ctrl-C: sandboxes, engines and temporary folders are cleaned up on the way out.

    Raised as the other signal, since the event loop turns that one into an orderly cancellation.
    """
    signal.raise_signal(signal.SIGINT)
