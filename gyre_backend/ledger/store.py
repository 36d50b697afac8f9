"""SQLite ledger of one run: orders, groups, executions, steps, leases, versions.

A group's life: dispatched -> ready -> assigned -> trained, or dispatched -> dropped; assigned goes back to
ready when its step is
aborted. Every transition is checked and made in one transaction with what belongs to it, synchronously on
disk.

The order at a step's end is: optimizer step in memory, checkpoint on disk under its final name, `commit_step`
here, publication of the
new weights. Whatever is killed in between, a restart takes the last checkpoint that the ledger names: groups
that are part of it are
trained, all others are not, and no sampler has seen weights that are forgotten (with a checkpoint at every
step).
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_backend.errors import LedgerError

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
  id TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, task TEXT NOT NULL, version INTEGER NOT NULL,
  attempt INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER, arrived INTEGER);
CREATE TABLE IF NOT EXISTS executions (
  id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups(id), outcome TEXT);
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER PRIMARY KEY, state TEXT NOT NULL, opened REAL NOT NULL, closed REAL,
  checkpoint TEXT, metrics TEXT);
CREATE TABLE IF NOT EXISTS leases (
  step INTEGER NOT NULL, micro INTEGER NOT NULL, lease INTEGER NOT NULL,
  cell TEXT NOT NULL, epoch INTEGER NOT NULL,
  PRIMARY KEY (step, micro));
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, digest TEXT NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups(state);
CREATE INDEX IF NOT EXISTS executions_by_group ON executions(group_id);
"""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group as the ledger knows it."""

    id: str
    number: int
    """Position in the order of dispatch, from 0."""
    task: str
    version: int
    """Policy version at its dispatch."""
    attempt: int
    state: str
    step: int | None
    executions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One committed step."""

    step: int
    """The version that it trained; it made `step + 1`."""
    checkpoint: str | None
    metrics: dict[str, Any]


class Ledger:
    """One run's ledger. Thread-safe; every method is one short transaction. Raises LedgerError on an illegal
    transition.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            stored = self._get("schema")
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"the ledger {path} can't be opened: {error}") from error
        if stored is None:
            self._set("schema", str(SCHEMA_VERSION))
        elif stored != str(SCHEMA_VERSION):
            raise LedgerError(f"the ledger {path} has schema {stored}, this Gyre knows {SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    # -- orders and groups

    def dispatch(
        self,
        group: str,
        task: str,
        executions: Sequence[str],
        version: int,
        attempt: int,
        order: Mapping[str, Any],
    ) -> int:
        """Record a new group and the order that announces it; returns the order's number."""
        with self._transaction() as db:
            number = int(db.execute("SELECT COUNT(*) FROM groups").fetchone()[0])
            db.execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?, 'dispatched', NULL, NULL)",
                (group, number, task, version, attempt),
            )
            db.executemany(
                "INSERT INTO executions VALUES (?, ?, NULL)", [(execution, group) for execution in executions]
            )
            return self._append_order(db, order)

    def order(self, body: Mapping[str, Any]) -> int:
        """Append an order that is not a group's; returns its number."""
        with self._transaction() as db:
            return self._append_order(db, body)

    def _append_order(self, db: sqlite3.Connection, body: Mapping[str, Any]) -> int:
        number = int(db.execute("SELECT COALESCE(MAX(number), -1) + 1 FROM orders").fetchone()[0])
        db.execute("INSERT INTO orders VALUES (?, ?)", (number, json.dumps({**body, "order": number})))
        return number

    def orders_after(self, after: int, limit: int = 1000) -> list[dict[str, Any]]:
        """Orders with numbers above `after`, in order."""
        with self._lock:
            rows = self._db.execute(
                "SELECT body FROM orders WHERE number > ? ORDER BY number LIMIT ?", (after, limit)
            ).fetchall()
        return [json.loads(body) for (body,) in rows]

    def last_order(self) -> int:
        """Number of the newest order, -1 when there is none."""
        with self._lock:
            return int(self._db.execute("SELECT COALESCE(MAX(number), -1) FROM orders").fetchone()[0])

    def seal(self, execution: str, outcome: Mapping[str, Any]) -> bool:
        """An execution has ended. False when that was known (a re-sent record), or the execution is not
        ours.
        """
        with self._transaction() as db:
            done = db.execute(
                "UPDATE executions SET outcome = ? WHERE id = ? AND outcome IS NULL",
                (json.dumps(outcome), execution),
            )
            return done.rowcount == 1

    def ready(self, group: str) -> None:
        """All executions of the group are sealed and it has something to train."""
        with self._transaction() as db:
            arrived = int(db.execute("SELECT COALESCE(MAX(arrived), -1) + 1 FROM groups").fetchone()[0])
            self._move(db, [group], "dispatched", "ready")
            db.execute("UPDATE groups SET arrived = ? WHERE id = ?", (arrived, group))

    def drop(self, group: str) -> None:
        """The group ended with nothing to train."""
        with self._transaction() as db:
            self._move(db, [group], "dispatched", "dropped")

    # -- steps

    def assign(self, step: int, groups: Iterable[str]) -> None:
        """The groups belong to step `step` (opened by this when it is new)."""
        names = list(groups)
        with self._transaction() as db:
            row = db.execute("SELECT state FROM steps WHERE step = ?", (step,)).fetchone()
            if row is not None and row[0] == "done":
                raise LedgerError(f"step {step} is done; no group can be added to it")
            db.execute("INSERT OR IGNORE INTO steps VALUES (?, 'open', ?, NULL, NULL, NULL)", (step, time.time()))
            self._move(db, names, "ready", "assigned")
            db.executemany("UPDATE groups SET step = ? WHERE id = ?", [(step, name) for name in names])

    def abort_step(self, step: int) -> list[str]:
        """The step's gradient is lost: its groups are ready again. Returns them."""
        with self._transaction() as db:
            query = "SELECT id FROM groups WHERE step = ? AND state = 'assigned' ORDER BY arrived"
            names = [row[0] for row in db.execute(query, (step,))]
            db.execute(
                "UPDATE groups SET state = 'ready', step = NULL WHERE step = ? AND state = 'assigned'",
                (step,),
            )
            db.execute("DELETE FROM steps WHERE step = ? AND state = 'open'", (step,))
            return names

    def commit_step(
        self,
        step: int,
        *,
        checkpoint: str | None,
        digest: str,
        leases: Iterable[tuple[int, int, str, int]],
        metrics: Mapping[str, Any],
    ) -> None:
        """The step is done and version `step + 1` exists: groups, leases (micro, lease, cell, epoch), metrics
        and checkpoint at once.
        """
        with self._transaction() as db:
            names = [r[0] for r in db.execute("SELECT id FROM groups WHERE step = ? AND state = 'assigned'", (step,))]
            if not names:
                raise LedgerError(f"step {step} has no assigned groups to commit")
            self._move(db, names, "assigned", "trained")
            done = db.execute(
                "UPDATE steps SET state = 'done', closed = ?, checkpoint = ?, metrics = ? "
                "WHERE step = ? AND state = 'open'",
                (time.time(), checkpoint, json.dumps(dict(metrics)), step),
            )
            if done.rowcount != 1:
                raise LedgerError(f"step {step} is not open")
            db.executemany("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", [(step, *lease) for lease in leases])
            db.execute("INSERT INTO versions VALUES (?, ?, ?)", (step + 1, digest, time.time()))

    def start(self, version: int, checkpoint: str) -> None:
        """A new run starts from `version` (0), saved at `checkpoint`."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO versions VALUES (?, '', ?)", (version, time.time()))
            db.execute("INSERT OR IGNORE INTO meta VALUES ('first_checkpoint', ?)", (checkpoint,))

    def recover(self) -> tuple[int, str | None]:
        """After a restart: forget what no checkpoint holds. Returns (version, checkpoint) to go on from; (0,
        None) for a new run.

        Groups of steps after the last checkpoint are ready again; their versions are forgotten.
        """
        with self._transaction() as db:
            row = db.execute(
                "SELECT step + 1, checkpoint FROM steps WHERE state = 'done' AND checkpoint IS NOT NULL "
                "ORDER BY step DESC LIMIT 1"
            ).fetchone()
            version, checkpoint = (int(row[0]), str(row[1])) if row else (0, self._get("first_checkpoint"))
            db.execute(
                "UPDATE groups SET state = 'ready', step = NULL "
                "WHERE state = 'assigned' OR (state = 'trained' AND step >= ?)",
                (version,),
            )
            db.execute("DELETE FROM steps WHERE step >= ? OR state = 'open'", (version,))
            db.execute("DELETE FROM leases WHERE step >= ?", (version,))
            db.execute("DELETE FROM versions WHERE version > ?", (version,))
            return version, checkpoint

    # -- reading

    def groups(self, *states: str) -> list[GroupRow]:
        """Groups in any of `states` (all when none is given), in order of arrival, then of dispatch."""
        where = f"WHERE state IN ({', '.join('?' * len(states))})" if states else ""
        return self._read_groups(where, states)

    def group(self, name: str) -> GroupRow | None:
        """One group."""
        return next(iter(self._read_groups("WHERE id = ?", (name,))), None)

    def num_groups(self) -> int:
        """Groups so far."""
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0])

    def _read_groups(self, where: str, values: Sequence[str]) -> list[GroupRow]:
        with self._lock:
            rows = self._db.execute(
                f"SELECT id, number, task, version, attempt, state, step FROM groups {where} "
                "ORDER BY COALESCE(arrived, 1 << 60), number",
                tuple(values),
            ).fetchall()
            members = {
                row[0]: tuple(
                    execution
                    for (execution,) in self._db.execute(
                        "SELECT id FROM executions WHERE group_id = ? ORDER BY rowid", (row[0],)
                    )
                )
                for row in rows
            }
        return [
            GroupRow(name, number, task, version, attempt, state, step, members[name])
            for name, number, task, version, attempt, state, step in rows
        ]

    def outcomes(self, group: str) -> dict[str, dict[str, Any] | None]:
        """Execution -> outcome (None while it runs) of one group, in the order of its dispatch."""
        with self._lock:
            rows = self._db.execute(
                "SELECT id, outcome FROM executions WHERE group_id = ? ORDER BY rowid", (group,)
            ).fetchall()
        return {execution: None if outcome is None else json.loads(outcome) for execution, outcome in rows}

    def group_of(self, execution: str) -> str | None:
        """The group that an execution belongs to."""
        with self._lock:
            row = self._db.execute("SELECT group_id FROM executions WHERE id = ?", (execution,)).fetchone()
        return None if row is None else str(row[0])

    def steps(self) -> list[StepRow]:
        """Committed steps, in order."""
        with self._lock:
            query = "SELECT step, checkpoint, metrics FROM steps WHERE state = 'done' ORDER BY step"
            rows = self._db.execute(query).fetchall()
        return [StepRow(step, checkpoint, json.loads(metrics or "{}")) for step, checkpoint, metrics in rows]

    def versions(self) -> list[int]:
        """Policy versions that exist, in order."""
        with self._lock:
            return [int(row[0]) for row in self._db.execute("SELECT version FROM versions ORDER BY version")]

    def counts(self) -> tuple[int, int]:
        """(executions dispatched, executions finished)."""
        with self._lock:
            row = self._db.execute("SELECT COUNT(*), COUNT(outcome) FROM executions").fetchone()
        return int(row[0]), int(row[1])

    # -- inside

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise LedgerError(f"the ledger {self.path.name} refused a write: {error}") from error
            except BaseException:  # cleans up and raises again
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _move(self, db: sqlite3.Connection, names: Sequence[str], source: str, target: str) -> None:
        for name in names:
            done = db.execute("UPDATE groups SET state = ? WHERE id = ? AND state = ?", (target, name, source))
            if done.rowcount != 1:
                row = db.execute("SELECT state FROM groups WHERE id = ?", (name,)).fetchone()
                state = "unknown" if row is None else row[0]
                raise LedgerError(f"group {name} is {state}, so it can't go from {source} to {target}")

    def get_meta(self, key: str) -> str | None:
        """A value kept for the run (the runner's registration, say)."""
        with self._lock:
            return self._get(key)

    def set_meta(self, key: str, value: str) -> None:
        """Keep a value for the run."""
        self._set(key, value)

    def _get(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _set(self, key: str, value: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
