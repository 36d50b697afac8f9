"""`gyre wal verify|repair|cat`: look at write-ahead logs, and cut what a crash left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import cyclopts
import msgspec
from rich.console import Console

from gyre_sdk.capture.flusher import recover
from gyre_sdk.errors import ConfigError
from gyre_sdk.wire import WalReader, repair, verify
from gyre_sdk.wire.records import Failed, Intent, Result

app = cyclopts.App(name="wal", help="Verify, repair or print a write-ahead log.")


def _logs(path: Path) -> Iterator[Path]:
    """The WAL itself, or every WAL under a folder."""
    if path.is_file():
        yield path
        return
    found = sorted(path.rglob("wal.gyre")) if path.is_dir() else []
    if not found:
        raise ConfigError(f"no WAL at {path}: give a wal.gyre, an execution's folder or a run's folder")
    yield from found


def _play_journals(path: Path) -> Iterator[tuple[Path, int]]:
    """After a crash of the machine the last records may be in the run's journal only: put them where they belong."""
    folders = path.rglob("journal.gyre") if path.is_dir() else iter(())
    above = [folder / "journal.gyre" for folder in path.resolve().parents[:3]]
    for journal in {*folders, *(one for one in above if one.is_file())}:
        played = recover(journal)
        if played:
            yield journal, played


@app.command(name="verify")
def verify_command(path: Path) -> int:
    """Check every frame and record; exit code 1 when one is damaged or a tail is torn.

    Parameters
    ----------
    path
        A WAL, or a folder that holds some.
    """
    console = Console(highlight=False)
    bad = 0
    for log in _logs(path):
        report = verify(log)
        console.print(str(report), style=None if report.ok else "yellow", soft_wrap=True, markup=False)
        bad += not report.ok
    return 1 if bad else 0


@app.command(name="repair")
def repair_command(path: Path, *, cut_damage: bool = False) -> int:
    """Complete logs from the journal of a machine that crashed, then cut torn tails; what is cut is kept beside the log.

    Parameters
    ----------
    path
        A WAL, or a folder that holds some.
    cut_damage
        Cut at damage in the middle too. Every record behind it is lost to Gyre (and kept in the file beside).
    """
    console = Console(highlight=False)
    for journal, played in _play_journals(path):
        console.print(f"{journal}: {played} entries written to their logs", soft_wrap=True, markup=False)
    for log in _logs(path):
        report = repair(log, cut_damage=cut_damage)
        word = (
            "was whole" if report.ok else f"cut {report.torn_bytes} bytes, kept as {log.name}.cut-{report.good_bytes}"
        )
        console.print(f"{log}: {word}", soft_wrap=True, markup=False)
    return 0


@app.command(name="cat")
def cat_command(path: Path, *, tokens: bool = False) -> int:
    """Print the records as JSON lines.

    Parameters
    ----------
    path
        A WAL, or a folder that holds some.
    tokens
        Print token ids and logprobs too (base64 of raw little-endian arrays), not just their counts.
    """
    for log in _logs(path):
        for frame in WalReader(log).frames():
            record = frame.record()
            fields: dict[str, object] = msgspec.to_builtins(record)
            if not tokens and isinstance(record, Intent | Result | Failed):
                for name in ("delta", "ids", "logprobs"):
                    if name in fields:
                        fields[name] = f"{len(getattr(record, name)) // 4} values"
            for name in ("request", "message"):
                value = getattr(record, name, None)
                if isinstance(value, bytes):
                    fields[name] = value.decode(errors="replace")
            sys.stdout.write(msgspec.json.encode({"seq": frame.seq, **fields}).decode() + "\n")
    return 0
