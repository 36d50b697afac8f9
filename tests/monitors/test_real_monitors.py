"""The real TensorBoard, W&B (offline) and trackio, and what they read back. `make test-monitors`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gyre_backend.monitors import make_monitors
from gyre_sdk.errors import ConfigError

pytestmark = [pytest.mark.monitors, pytest.mark.filterwarnings("default")]

ROWS = [
    {
        "step": step,
        "at": 1764000000.0 + step,
        "loss": 0.5 / (step + 1),
        "reward": 0.1 * step,
        "cells": {"cell0": step + 1},
    }
    for step in range(5)
]


def send(name: str, run_dir: Path, rows: Sequence[dict[str, object]], **options: object) -> None:
    monitors = make_monitors(
        [name], run_dir, config={"train": {"lr": 1e-6}}, options={name: options} if options else {}
    )
    for row in rows:
        monitors.step(row)
    monitors.close(timeout=90)
    assert monitors.failed == {}
    assert monitors.dropped == 0


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    send("tensorboard", run_dir, ROWS)
    # Gone on with from step 3, as after a rollback: the later steps are those of the second time.
    send("tensorboard", run_dir, [{**row, "reward": 9.0} for row in ROWS[3:]])
    read = EventAccumulator(str(run_dir / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"loss", "reward", "cells/cell0"}
    rewards = read.Scalars("reward")
    assert [event.step for event in rewards] == [0, 1, 2, 3, 4]
    assert [event.value for event in rewards] == pytest.approx([0.0, 0.1, 0.2, 9.0, 9.0])
    assert [event.wall_time for event in rewards] == [row["at"] for row in ROWS]
    elsewhere = tmp_path / "elsewhere"
    send("tensorboard", run_dir, ROWS[:1], folder=str(elsewhere))
    assert list(elsewhere.glob("events.*"))


def test_wandb_offline_holds_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_dir = tmp_path / "run"
    send("wandb", run_dir, ROWS, mode="offline", tags=["t"])
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    history, config = read_wandb(file)
    deadline = time.monotonic() + 30
    while len(history) < len(ROWS) and time.monotonic() < deadline:
        time.sleep(0.1)  # W&B's own process writes the file, and may do so just after it said that it is done
        history, config = read_wandb(file)
    assert [row["_step"] for row in history] == [0, 1, 2, 3, 4]
    assert [row["reward"] for row in history] == pytest.approx([row["reward"] for row in ROWS])
    assert history[2]["cells/cell0"] == 3
    assert json.loads(config["train"]) == {"lr": 1e-6}


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format behind W&B's header of 7 bytes: blocks of 32 KiB, in them pieces with a
    checksum (4 bytes), a length (2) and a type (1: whole, 2: first, 3: middle, 4: last).
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record = data[at + 7 : at + 7 + length] if kind in (1, 2) else record + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record


def read_wandb(file: Path) -> tuple[list[dict[str, float]], dict[str, str]]:
    """History lines and configuration of an offline run's file."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, float]] = []
    config: dict[str, str] = {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
        elif kind == "run":
            config.update({(i.key or "/".join(i.nested_key)): i.value_json for i in record.run.config.update})
    return history, config


def test_wandb_settings_that_are_wrong_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wandb\.mode: expected online or offline"):
        make_monitors(["wandb"], tmp_path, options={"wandb": {"mode": "off"}})
    with pytest.raises(ConfigError, match=r"wandb\.projekt: unknown"):
        make_monitors(["wandb"], tmp_path, options={"wandb": {"projekt": "x"}})


def test_trackio_keeps_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    assert trackio.__version__
    send("trackio", tmp_path / "my-run", ROWS)
    rows = SQLiteStorage.get_logs("gyre", "my-run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["reward"] for row in rows] == pytest.approx([row["reward"] for row in ROWS])
