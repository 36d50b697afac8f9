"""`gyre gateway`: keys are printed, harnesses are served, a second start goes on; mistakes are one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gyre_sdk.cli.app import main
from gyre_sdk.errors import ConfigError, StorageError
from gyre_sdk.testing import ScriptedEngine, ScriptedServer, in_turn
from tests.gateway.conftest import make_renderer

pytestmark = pytest.mark.anyio


async def test_it_serves_and_goes_on(tmp_path: Path) -> None:
    import anyio

    renderer = make_renderer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    async with ScriptedServer(ScriptedEngine(renderer, in_turn(["hello"]))).serving() as url:
        command = [
            sys.executable, "-c", "from gyre_sdk.cli import main; main()", "gateway", "--engine-url", url, "-m", str(tmp_path / "model"),
            "--run-dir", str(tmp_path / "run"), "--port", "0",
        ]  # fmt: skip
        key = ""
        for more, expected in ((["-n", "1"], "opened"), ([], "goes on")):
            process = await anyio.open_process([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            said = ""
            while expected not in said or not said.endswith("\n"):
                said += (await process.stdout.receive()).decode()
            key = key or re.findall(r"key (\S+)", said)[0]
            gateway = re.findall(r"gateway  (\S+)", said)[0]
            async with httpx.AsyncClient(headers={"x-api-key": key}) as http:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                answer = await http.post(f"{gateway}/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "hello"
            os.kill(process.pid, signal.SIGINT)
            assert await process.wait() == 130
            await process.aclose()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "no loopback address"),
        (["--tls-cert", "x.pem"], "belong together"),
        (["--tls-cert", "/no/x.pem", "--tls-key", "/no/y.pem"], "no usable certificate"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    make_renderer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    base = [
        "gateway",
        "--engine-url",
        "http://127.0.0.1:9",
        "-m",
        str(tmp_path / "model"),
        "--run-dir",
        str(tmp_path / "r"),
    ]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main([*base, *arguments])
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_errors_of_ours_are_told_from_bugs_also_inside_groups() -> None:
    from gyre_sdk.cli.app import _first

    ours = StorageError("the disk is full")
    assert _first(ours) is ours
    assert _first(ExceptionGroup("", [ExceptionGroup("", [ours]), ConfigError("second")])) is ours
    assert _first(ExceptionGroup("", [ours, ValueError("a bug")])) is None
