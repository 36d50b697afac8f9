"""The ledger: legal transitions only, and after a crash at any point each group is trained once or ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_backend.errors import LedgerError
from gyre_backend.ledger import Ledger


def order(ledger: Ledger, group: str, version: int = 0) -> int:
    executions = [f"{group}-{i}" for i in range(2)]
    return ledger.dispatch(group, "task", executions, version, 0, {"kind": "group", "group": group})


def make_ready(ledger: Ledger, *groups: str) -> None:
    for group in groups:
        order(ledger, group)
        for i in range(2):
            assert ledger.seal(f"{group}-{i}", {"reward": 1.0})
        ledger.ready(group)


def commit(ledger: Ledger, step: int, checkpoint: str | None) -> None:
    ledger.commit_step(step, checkpoint=checkpoint, digest="d", leases=[(0, 0, "cell0", 1)], metrics={"loss": 1.0})


def test_a_group_s_life(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.recover() == (0, None)
    assert [order(ledger, "a"), order(ledger, "b")] == [0, 1]
    assert [o["order"] for o in ledger.orders_after(-1)] == [0, 1]
    assert ledger.orders_after(0)[0]["group"] == "b"
    assert ledger.seal("a-0", {"reward": 0.0})
    assert not ledger.seal("a-0", {"reward": 0.0}), "a re-sent record changes nothing"
    assert not ledger.seal("strange", {})
    assert ledger.counts() == (4, 1)
    assert ledger.group_of("b-1") == "b"
    ledger.seal("a-1", {"reward": 1.0})
    ledger.ready("a")
    with pytest.raises(LedgerError, match="ready"):
        ledger.ready("a")
    with pytest.raises(LedgerError, match="dispatched"):
        ledger.assign(0, ["b"])
    ledger.assign(0, ["a"])
    with pytest.raises(LedgerError, match="assigned"):
        ledger.assign(0, ["a"])
    assert ledger.abort_step(0) == ["a"]
    ledger.assign(0, ["a"])
    commit(ledger, 0, "c1")
    with pytest.raises(LedgerError):
        ledger.assign(0, ["b"])
    with pytest.raises(LedgerError):
        commit(ledger, 0, "c1")
    ledger.drop("b")
    assert {g.id: g.state for g in ledger.groups()} == {"a": "trained", "b": "dropped"}
    assert ledger.versions() == [1]
    assert ledger.recover() == (1, "c1")
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert [s.checkpoint for s in again.steps()] == ["c1"]
    again.close()


def test_a_failed_transaction_leaves_no_trace(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    make_ready(ledger, "a", "b")
    with pytest.raises(LedgerError):
        ledger.assign(0, ["a", "nothing"])
    assert [g.state for g in ledger.groups()] == ["ready", "ready"]
    with pytest.raises(LedgerError):
        order(ledger, "a")
    assert len(ledger.orders_after(-1)) == 2


def test_steps_after_the_last_checkpoint_are_forgotten(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    make_ready(ledger, "a", "b", "c", "d")
    for step, group in enumerate("abc"):
        ledger.assign(step, [group])
        commit(ledger, step, "c1" if step == 0 else None)
    ledger.assign(3, ["d"])
    assert ledger.recover() == (1, "c1")
    assert {g.id: (g.state, g.step) for g in ledger.groups()} == {
        "a": ("trained", 0),
        "b": ("ready", None),
        "c": ("ready", None),
        "d": ("ready", None),
    }
    assert ledger.versions() == [1]
    assert [s.step for s in ledger.steps()] == [0]


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "l"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    with pytest.raises(LedgerError, match="can't be opened"):
        Ledger(path)


@given(
    script=st.lists(
        st.sampled_from(["dispatch", "ready", "assign", "commit", "commit_saved", "abort", "crash"]), max_size=40
    )
)
def test_any_history_trains_each_group_once(script: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model of the run beside the ledger: which groups are in the weights that a restart would load."""
    path = tmp_path_factory.mktemp("l") / "ledger.sqlite"
    ledger = Ledger(path)
    version, in_weights, saved = 0, set[str](), (0, set[str]())
    number = 0
    for word in script:
        states = {g.id: g.state for g in ledger.groups()}
        ready = [g for g, s in states.items() if s == "ready"]
        assigned = [g for g, s in states.items() if s == "assigned"]
        if word == "dispatch":
            order(ledger, f"g{number}")
            number += 1
        elif word == "ready":
            for group in [g for g, s in states.items() if s == "dispatched"][:1]:
                ledger.ready(group)
        elif word == "assign" and ready:
            ledger.assign(version, ready[:2])
        elif word.startswith("commit") and assigned:
            commit(ledger, version, "c" if word == "commit_saved" else None)
            version, in_weights = version + 1, in_weights | set(assigned)
            if word == "commit_saved":
                saved = (version, set(in_weights))
        elif word == "abort":
            ledger.abort_step(version)
        elif word == "crash":
            ledger.close()
            ledger = Ledger(path)
            version, in_weights = ledger.recover()[0], set(saved[1])
            assert version == saved[0]
        states = {g.id: g.state for g in ledger.groups()}
        assert {g for g, s in states.items() if s == "trained"} == in_weights
        assert len(states) == number
        assert ledger.versions() == list(range(1, version + 1))
    ledger.close()


CHILD = """
import sys
from pathlib import Path
from gyre_backend.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
version, _ = ledger.recover()
ready = [g.id for g in ledger.groups("ready")]
print("up", flush=True)
for number in range(10**6):
    name = f"g{version}-{number}-{sys.argv[2]}"
    ledger.dispatch(name, "t", [name + "x"], version, 0, {"kind": "group"})
    ledger.seal(name + "x", {})
    ledger.ready(name)
    ledger.assign(version, [*ready, name])
    ready = []
    ledger.commit_step(version, checkpoint=f"c{version + 1}", digest="", leases=[], metrics={})
    version += 1
"""


def test_kill_9_in_mid_write(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    root = Path(__file__).resolve().parents[2]
    for round_number in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(round_number)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert child.stdout is not None
        child.stdout.readline()
        try:
            child.wait(0.15 + 0.1 * round_number)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    ledger = Ledger(path)
    version, checkpoint = ledger.recover()
    assert version > 0
    assert checkpoint == f"c{version}"
    assert ledger.versions() == list(range(1, version + 1))
    states = [g.state for g in ledger.groups()]
    assert set(states) <= {"trained", "ready", "dispatched"}
    assert states.count("trained") >= version
    steps = [g.step for g in ledger.groups("trained")]
    assert sorted(set(steps)) == list(range(version))
    ledger.close()
