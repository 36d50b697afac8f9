"""Recorded executions as a workload: Gyre's own runs (WAL folders), or a small table from anybody else's
logs.

The table is CSV with a header, or JSON lines, one execution a row:

    start     seconds (any epoch)                        required
    end       seconds                                    required
    outcome   completed | timeout | anything else        optional, default completed
    tokens    unique tokens of the execution             optional, default 0 = unknown
    group     executions that share a baseline           optional; without it, consecutive rows of
    `group_size` engine_s  seconds spent waiting for the engine       optional; gives the tool share
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_backend.sim.workload import LogNormal, Recorded, Sample, fit_lognormal
from gyre_sdk.errors import ConfigError, CorruptRecordError
from gyre_sdk.wire.files import WalReader
from gyre_sdk.wire.records import Intent, Opened, Result, Sealed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded execution. Times in s."""

    start: float
    end: float
    timed_out: bool = False
    tokens: float = 0.0
    group: str = ""
    engine_s: float | None = None

    @property
    def duration_s(self) -> float:
        """Wall-clock."""
        return self.end - self.start


def read_trace(path: Path) -> list[Row]:
    """The executions of a run folder (or a folder of WALs), a CSV or a JSON-lines file, by start.

    Raises:
        ConfigError: names file, line and column of what can't be read; a trace without finished executions.
    """
    if path.is_dir():
        rows = list(_from_wals(path))
    elif path.suffix in (".jsonl", ".ndjson"):
        rows = list(_rows(path, _json_lines(path)))
    elif path.suffix == ".csv":
        with _open(path) as file:
            rows = list(_rows(path, enumerate(csv.DictReader(file), 2)))
    else:
        raise ConfigError(f"{path}: expected a run folder, a .csv or a .jsonl file")
    if not rows:
        raise ConfigError(f"{path}: no finished execution")
    return sorted(rows, key=lambda row: row.start)


def _open(path: Path) -> Any:
    try:
        return path.open(newline="")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: expected an object, got {type(row).__name__}")
            yield number, row


def _rows(path: Path, table: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[Row]:
    for number, raw in table:
        where = f"{path}:{number}"
        start, end = _number(where, raw, "start"), _number(where, raw, "end")
        if start is None or end is None:
            raise ConfigError(f"{where}: start and end are required")
        if end <= start:
            raise ConfigError(f"{where}: end ({end}) must be after start ({start})")
        yield Row(
            start=start,
            end=end,
            timed_out=str(raw.get("outcome") or "completed") == "timeout",
            tokens=_number(where, raw, "tokens") or 0.0,
            group=str(raw.get("group") or ""),
            engine_s=_number(where, raw, "engine_s"),
        )


def _number(where: str, raw: Mapping[str, Any], column: str) -> float | None:
    value = raw.get(column)
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: column {column!r} is not a number: {value!r}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{where}: column {column!r} must be finite, got {value!r}")
    return number


def _from_wals(folder: Path) -> Iterator[Row]:
    root = folder / "executions" if (folder / "executions").is_dir() else folder
    for path in sorted(root.glob("*/wal.gyre")):
        try:
            row = _from_wal(path)
        except CorruptRecordError as error:
            log.warning("left out: %s", error)
            continue
        if row is not None:
            yield row


def _from_wal(path: Path) -> Row | None:
    """None for an execution that was never sealed: its length isn't known."""
    opened: Opened | None = None
    sealed: Sealed | None = None
    asked: dict[int, float] = {}
    tokens = engine_s = 0.0
    for frame in WalReader(path).frames():
        match frame.record():
            case Opened() as record:
                opened = record
            case Intent(call=call, at=at, delta=delta):
                asked[call] = at
                tokens += len(delta) // 4
            case Result(call=call, at=at, ids=ids):
                engine_s += at - asked.get(call, at)
                tokens += len(ids) // 4
            case Sealed() as record:
                sealed = record
            case _:
                pass
    if opened is None or sealed is None or sealed.at <= opened.at:
        return None
    timed_out = sealed.outcome.status == "timeout"
    return Row(opened.at, sealed.at, timed_out, tokens, opened.group, engine_s)


def groups_of(rows: list[Row], group_size: int = 8) -> list[list[Row]]:
    """By `group`; rows without one in consecutive runs of `group_size`."""
    named: dict[str, list[Row]] = {}
    loose: list[Row] = []
    for row in rows:
        if row.group:
            named.setdefault(row.group, []).append(row)
        else:
            loose.append(row)
    return [*named.values(), *(loose[i : i + group_size] for i in range(0, len(loose), group_size))]


def recorded(path: Path, group_size: int = 8) -> Recorded:
    """A workload that draws the recorded groups again.

    A timed-out execution's full length is unknown: it gets the mean of the fitted lognormal's tail beyond the
    limit, so that another time limit or load can be tried.
    """
    return workload_of(read_trace(path), group_size)


def workload_of(rows: list[Row], group_size: int = 8) -> Recorded:
    """See `recorded`."""
    cut = [row.timed_out for row in rows]
    fit = fit_lognormal([r.duration_s for r in rows], cut) if any(cut) and not all(cut) and len(rows) > 2 else None

    def sample(row: Row) -> Sample:
        full = row.duration_s
        if row.timed_out:
            full = tail_mean(fit, full) if fit else 2 * full
        return Sample(full, row.tokens * full / row.duration_s)

    return Recorded(tuple(tuple(sample(row) for row in group) for group in groups_of(rows, group_size)))


def tail_mean(fit: LogNormal, beyond_s: float) -> float:
    """E[D | D > beyond_s], s, at most ten times `beyond_s`."""
    full, cut = fit.mean_s(), fit.mean_s(beyond_s)
    # E[D] - E[min(D, x)] = P(D > x) * (E[D | D > x] - x)
    z = (math.log(beyond_s / fit.median_s)) / max(fit.sigma, 1e-9)
    share = math.erfc(z / math.sqrt(2)) / 2
    return min(beyond_s + (full - cut) / share, 10 * beyond_s) if share > 1e-9 else beyond_s


def tool_share(rows: list[Row]) -> float | None:
    """Share of the wall-clock spent outside the engine; None if the trace doesn't say."""
    known = [(r.duration_s, r.engine_s) for r in rows if r.engine_s is not None]
    total = sum(duration for duration, _ in known)
    return min(max(1 - sum(e for _, e in known) / total, 0.0), 1.0) if total else None


def peak_concurrency(rows: list[Row]) -> int:
    """Most executions that ran at once."""
    changes = sorted([(r.start, 1) for r in rows] + [(r.end, -1) for r in rows])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
