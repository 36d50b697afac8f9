"""`gyre view`: a run in the browser."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from gyre_sdk.capture.serving import LOOPBACK, serve_app
from gyre_sdk.cli.graph import find_target
from gyre_sdk.errors import ConfigError
from gyre_sdk.viewer.server import LOCAL, Viewer


def view(
    run: str = "",
    *,
    port: Annotated[int, Parameter(help="0: any free one")] = 0,
    host: str = "127.0.0.1",
    token: bool = False,
    browser: bool = True,
    model: Path | None = None,
) -> int:
    """Show a run in the browser: executions, branch graphs, tokens; live while it goes on. Read-only.

    Parameters
    ----------
    run
        A run's folder, an execution's id, folder or log; nothing means the newest run.
    host
        Address to listen on. Off loopback the page asks for a token, which is in the printed address; it travels in the
        clear, so over a network you don't trust use `ssh -L` instead.
    token
        Ask for a token on loopback too (other users of this machine can reach its loopback addresses).
    browser
        Open the browser. `--no-browser` only prints the address.
    model
        Folder with the tokenizer, when the run does not name it or it has moved.
    """
    run_dir, execution = _target(run)
    if model is not None and not (model / "tokenizer.json").is_file():
        raise ConfigError(f"{model} holds no tokenizer.json")
    secret = secrets.token_urlsafe(24) if token or host not in LOOPBACK else None
    viewer = Viewer(run_dir, model_dir=model)
    app = viewer.app(token=secret, hosts=LOCAL if host in LOOPBACK else None)
    place = (f"?token={secret}" if secret else "") + (f"#/x/{execution}" if execution else "")
    console = Console()

    async def serve() -> None:
        async with serve_app(app, host, port, anywhere=secret is not None) as url:
            console.print(f"{run_dir.name}: {url}/{place}", highlight=False, markup=False, soft_wrap=True)
            console.print("Ctrl-C ends it", style="dim")
            if browser and _has_screen():
                threading.Thread(target=webbrowser.open, args=(f"{url}/{place}",), daemon=True).start()
            await asyncio.Event().wait()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        console.print("ended", style="dim")
    return 0


def _target(run: str) -> tuple[Path, str]:
    """(the run's folder, execution or ""). Raises ConfigError."""
    path = find_target(run).resolve()
    if path.is_dir():
        return path, ""
    if path.name != "wal.gyre" or path.parent.parent.name != "executions":
        raise ConfigError(f"{path} is no log in a run's folder; `gyre graph` prints it")
    return path.parents[2], path.parent.name


def _has_screen() -> bool:
    """Without one, a browser that can be found is a text browser, and would take this terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
