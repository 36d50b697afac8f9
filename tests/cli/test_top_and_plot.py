"""`gyre top` and `gyre plot` on a run that was made here: while it goes on, after it, and when it holds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from gyre_sdk.cli.app import make_app
from gyre_sdk.cli.plot import draw, moving_mean, points, step_rows
from gyre_sdk.cli.top import render, spark, strip, token_rates
from gyre_sdk.errors import ConfigError
from gyre_sdk.viewer.runs import RunData
from gyre_sdk.wire import encode, file_header
from tests.exporters.examples import T0, records

NASTY = "\x1b]0;owned\x07[bold]x[/bold]\u202e"


def make_run(folder: Path, *, whole: bool = True, steps: int = 3) -> Path:
    """One execution (the example's, cut off after call 0 when not `whole`), and the files of a training run."""
    log = folder / "executions" / "0123456789ab" / "wal.gyre"
    log.parent.mkdir(parents=True)
    shown = records() if whole else records()[:2]
    log.write_bytes(file_header() + b"".join(encode(record, seq) for seq, record in enumerate(shown)))
    (folder / "run.json").write_text(json.dumps({"kind": "train", "model": "/models/tiny", "harness": NASTY}))
    rows = [
        {
            "step": step, "policy_version": step + 1, "at": T0 + 4 * (step + 1), "loss": 0.1 * step, "reward": 0.25 * step,
            "reward_min": 0.0, "reward_max": 1.0, "sharing": 0.3, "staleness": 0.5, "seconds": 2.0, "micro_seconds": 1.0,
            "micro_steps": 2, "trained_tokens": 100, "cells": {"cell-0": 2},
        }
        for step in range(steps)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [("rollout to training", 4.0), ("training to rollout", 6.0)]
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"at": T0 + at, "event": name, "cell": "cell-0"}) + "\n" for name, at in events)
    )
    return folder


def read(folder: Path) -> RunData:
    data = RunData(folder)
    data.update()
    return data


def shown(data: RunData, rows: int = 20) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(render(data, rows))
        return console.export_text()


def test_top_shows_executions_cells_step_and_reward(tmp_path: Path) -> None:
    text = shown(read(make_run(tmp_path / "run")))
    for part in (
        "0123456789ab",
        "executions 1",
        "ended 1",
        "reward 0.500",
        "step 3",
        "policy version 3",
        "cell-0",
        "3–4",
    ):
        assert part in text
    assert "tools or grading" not in text
    assert not set("\x1b\x07\u202e") & set(text)
    assert "[bold]x[/bold]" in text


def test_top_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    data = read(make_run(tmp_path / "run", whole=False, steps=0))
    text = shown(data)
    assert "sampling" in text
    assert "calls in flight 1" in text
    log = next((tmp_path / "run").glob("executions/*/wal.gyre"))
    with log.open("ab") as file:
        file.writelines(encode(record, seq + 2) for seq, record in enumerate(records()[2:]))
    data.update()
    assert "ended 1" in shown(data)


def test_top_of_an_empty_run_and_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "executions").mkdir(parents=True)
    assert "executions 0" in shown(read(tmp_path / "run"))
    assert make_app()(["top", str(make_run(tmp_path / "other")), "--once"]) == 0
    assert "0123456789ab" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="interval"):
        make_app()(["top", str(tmp_path / "other"), "--interval", "0"])


def test_runs_alone_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a-run-with-quite-a-long-name")
    for words in (["runs", "--root", str(tmp_path)], ["runs", "ls", "--root", str(tmp_path)]):
        assert make_app()(words) == 0
        assert "a-run-with-quite-a-long-name" in capsys.readouterr().out


def test_token_rates_count_a_reply_over_the_time_it_took(tmp_path: Path) -> None:
    data = read(make_run(tmp_path / "run"))
    # The seven replies took half a second each and sampled 3 + 2 + 2 + 3 + 2 + 2 + 1 tokens, in seven and a half seconds.
    now, whole = token_rates(data, now=T0 + 7)
    assert now == pytest.approx(15 / 60)
    # The failed call ends half a second later and sampled nothing.
    assert whole == pytest.approx(15 / 7.5)
    assert token_rates(data, now=T0 + 1000) == (0.0, pytest.approx(15 / 7.5))
    half, _ = token_rates(data, now=T0 + 0.25)
    assert half == pytest.approx(1.5 / 60)


def test_sparks_and_strips() -> None:
    assert spark([]) == ""
    assert spark([1.0, 1.0]) == "▄▄"
    assert spark([0.0, 1.0]) == "▁█"
    assert strip([[0.0, 5.0, "rollout"], [5.0, None, "training"]], 10.0, 10).plain == "█████▒▒▒▒▒"
    assert strip([[0.0, None, "lost"]], 0.0, 3).plain == "xxx"


def test_curves_have_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    rows = step_rows(read(make_run(tmp_path / "run")))
    assert points(rows, "reward", "step") == ([1, 2, 3], [0.0, 0.25, 0.5])
    assert points(rows, "reward", "tokens")[0] == [100.0, 200.0, 300.0]
    assert points(rows, "reward", "minutes")[0] == pytest.approx([2 / 60, 6 / 60, 10 / 60])
    assert points(rows, "missing", "step") == ([], [])
    assert moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    # Step 0, four seconds: calls 0 to 3 took half a second each, micro-steps one.
    assert rows[0]["idle_share"] == pytest.approx(1 - (4 * 0.5 + 1.0) / 4)
    # Step 1: in training for two of its four seconds, so call 6 alone counts of calls 4 to 6 beside call 7, which failed.
    assert rows[1]["idle_share"] == pytest.approx(1 - (0.5 + 1.0) / 4)


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "_two")
    app = make_app()
    assert app(["plot", str(one)]) == 0
    assert (one / "plot.png").read_bytes().startswith(b"\x89PNG")
    target = tmp_path / "new" / "both.svg"
    assert app(["plot", str(one), str(two), "-o", str(target), "--smooth", "2", "--against", "minutes"]) == 0
    assert b"</svg>" in target.read_bytes()
    figure = draw([read(one), read(two)])
    assert [line.get_label() for line in figure.axes[0].lines] == ["one", "two"]
    assert len(figure.axes) == 5
    assert len(draw([read(one)]).axes) == 6


def test_mistakes_in_plotting_are_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "run")
    app = make_app()
    with pytest.raises(ConfigError, match="must end with"):
        app(["plot", str(run), "-o", str(tmp_path / "x.txt")])
    with pytest.raises(ConfigError, match="against"):
        app(["plot", str(run), "--against", "time"])
    (tmp_path / "empty" / "executions").mkdir(parents=True)
    with pytest.raises(ConfigError, match="nothing to draw"):
        app(["plot", str(tmp_path / "empty")])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        app(["plot", str(run), "-o", str(tmp_path / "file" / "x.png")])


def test_live_top_in_a_terminal_ends_with_ctrl_c(tmp_path: Path) -> None:
    """In a pseudo-terminal: draws, follows, and leaves the terminal as it was."""
    import os
    import pty
    import signal

    run = make_run(tmp_path / "run", whole=False)
    master, slave = pty.openpty()
    code = "import sys; from gyre_sdk.cli import main; main(['top', sys.argv[1], '--interval', '0.1'])"
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    seen, deadline = b"", time.monotonic() + 60
    while b"sampling" not in seen and time.monotonic() < deadline:
        seen += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(master, 65536):
            seen += chunk
    except OSError:
        pass  # the other end is closed
    assert process.wait(30) == 130
    os.close(master)
    assert b"sampling" in seen
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
