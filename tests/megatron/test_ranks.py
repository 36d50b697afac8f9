"""The launcher: ranks answer in order, none outlives a failure or its parent, nothing of theirs reaches our stdout."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gyre_backend.errors import TrainingError
from gyre_backend.trainers.ranks import Ranks

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch) -> None:
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def gone(pid: int) -> bool:
    """Whether the process ends within half a minute."""
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def test_answers_come_by_rank_and_closing_ends_all() -> None:
    ranks = Ranks(2, "fake_replica:Replica", None)
    assert ranks.call("logprobs", each=["number", "number"]) == [0, 1]
    pids = ranks.call("logprobs", "pid")
    ranks.close()
    ranks.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(TrainingError, match="closed"):
        ranks.call("logprobs", "number")


@pytest.mark.parametrize(
    ("order", "said"), [("crash", r"rank 1 failed during 'logprobs'.*KeyError"), ("die", r"rank 1 died .*status 7")]
)
def test_a_rank_that_fails_ends_the_others(order: str, said: str) -> None:
    ranks = Ranks(2, "fake_replica:Replica", None)
    pids = ranks.call("logprobs", "pid")
    with pytest.raises(TrainingError, match=f"(?s){said}"):
        ranks.call("logprobs", order)  # rank 0 sleeps meanwhile, as in a collective
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_hangs_and_one_that_refuses() -> None:
    with pytest.raises(TrainingError, match="does not want to"):
        Ranks(1, "fake_replica:Replica", "refuse")
    ranks = Ranks(1, "fake_replica:Replica", None)
    with pytest.raises(TrainingError, match=r"\[0\] did not finish 'logprobs' within 0.5 s"):
        ranks.call("logprobs", "hang", timeout=0.5)


def test_ranks_die_with_their_parent_and_keep_off_its_stdout() -> None:
    script = """
    import os, signal
    from gyre_backend.trainers.ranks import Ranks
    ranks = Ranks(1, "fake_replica:Replica", None)
    ranks.call("logprobs", "print")
    print(ranks.call("logprobs", "pid")[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert gone(int(done.stdout))
