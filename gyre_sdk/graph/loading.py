"""A branch graph from a log on disk: of a finished, running, killed or damaged execution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import ConfigError, CorruptRecordError, GraphError
from gyre_sdk.graph.branch_graph import BranchGraph
from gyre_sdk.wire import WalReader

LOG_NAME = "wal.gyre"


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A graph and what was wrong with its log."""

    graph: BranchGraph
    log: Path
    problem: str
    """Why reading stopped before the end; empty when it didn't."""


def load_graph(log: Path, *, keep_bodies: bool = False) -> LoadedGraph:
    """Read as far as the log is whole. Raises ConfigError when there is no log or nothing can be read of
    it.
    """
    if not log.is_file():
        raise ConfigError(f"no log at {log}")
    reader = WalReader(log)
    graph = BranchGraph(keep_bodies=keep_bodies)
    problem, size = "", log.stat().st_size
    try:
        for frame in reader.frames():
            graph.apply(frame.record())
        if reader.offset < size:
            problem = f"the last {size - reader.offset} bytes are an unfinished record"
    except (CorruptRecordError, GraphError) as error:
        problem = str(error)
    if graph.opened is None:
        raise ConfigError(f"nothing can be read from {log}: {problem or 'it holds no record'}")
    return LoadedGraph(graph, log, problem)


def find_log(run: Path, execution: str) -> Path:
    """The log of an execution in a run's folder, by its id or the unique beginning of it. Raises
    ConfigError.
    """
    folder = run / "executions"
    found = sorted(p for p in folder.glob(f"*/{LOG_NAME}") if p.parent.name.startswith(execution))
    exact = [p for p in found if p.parent.name == execution]
    if len(exact) == 1 or len(found) == 1:
        return (exact or found)[0]
    if not found:
        raise ConfigError(f"no execution {execution!r} in {run}")
    names = ", ".join(p.parent.name for p in found[:5])
    raise ConfigError(f"{execution!r} is not unique in {run}: {names}{' ...' if len(found) > 5 else ''}")
