"""Parquet: three tables over any number of executions: nodes, calls, branches. Needs pyarrow (extra
`export`).

Written execution by execution, so memory does not grow with the run. Token arrays are list columns of int32
and float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import MissingExtraError
from gyre_sdk.graph import BranchGraph

Row = dict[str, Any]


def write_parquet(graphs: Iterable[BranchGraph], folder: Path) -> list[Path]:
    """Writes nodes.parquet, calls.parquet and branches.parquet into `folder`. Raises MissingExtraError
    without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "export") from error
    folder.mkdir(parents=True, exist_ok=True)
    schemas = _schemas(pa)
    paths = {name: folder / f"{name}.parquet" for name in schemas}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(pq.ParquetWriter(paths[name], schema, compression="zstd"))
            for name, schema in schemas.items()
        }
        for graph in graphs:
            for name, rows in _TABLES.items():
                table = pa.Table.from_pylist(rows(graph), schema=schemas[name])
                if table.num_rows:
                    writers[name].write_table(table)
    return list(paths.values())


def node_rows(graph: BranchGraph) -> list[Row]:
    """One row per node, in order of id."""
    rows = []
    for identity, facts in graph.to_networkx().nodes(data=True):
        parent = graph.nodes[identity].parent
        rows.append(
            {
                "execution": graph.execution,
                "node": identity,
                "parent": None if parent is None else parent.id,
                **{key: facts[key] for key in ("provenance", "call", "offset", "start", "length", "owner", "role")},
                "orphan": facts.get("orphan", False),
                "token_ids": facts["token_ids"],
                "logprobs": facts.get("logprobs"),
                "version_starts": [start for _, start, _ in facts.get("versions", ())],
                "versions": [version for version, _, _ in facts.get("versions", ())],
            }
        )
    return rows


def call_rows(graph: BranchGraph) -> list[Row]:
    """One row per call, with the links that lead to it."""
    links: dict[int, list[Row]] = {}
    for link in graph.links():
        row = {"kind": link.kind, "source": link.source, "reason": link.reason, "inferred": link.inferred}
        links.setdefault(link.target, []).append(row)
    rows = []
    for number, call in sorted(graph.calls.items()):
        rows.append(
            {
                "execution": graph.execution,
                "call": number,
                "state": call.state,
                "role": graph.role_of_call(number),
                "dialect": call.dialect,
                "at": call.at,
                "first_token_at": call.first_token_at,
                "done_at": call.done_at,
                "prompt_tokens": call.prompt_tokens,
                "cached_tokens": call.cached_tokens,
                "output_tokens": len(call.output_ids),
                "finish": call.finish,
                "delivered": call.delivered,
                "engine": call.engine,
                "error": call.error,
                "rerender": call.rerender,
                "parent_call": graph.parent_call(number) if call.done else -1,
                "links": links.get(number, []),
                "marks": [{"name": name, "value": value} for name, value in sorted((call.marks or {}).items())],
                "sampling": msgspec.json.encode(call.sampling or {}).decode(),
            }
        )
    return rows


def branch_rows(graph: BranchGraph) -> list[Row]:
    """One row per leaf: the whole path, token by token, and what the execution was."""
    outcome, opened = graph.outcome, graph.opened
    rows = []
    for leaf in graph.leaves():
        path = leaf.path()
        rows.append(
            {
                "execution": graph.execution,
                "task": opened.task if opened else "",
                "group": opened.group if opened else "",
                "leaf": leaf.id,
                "call": leaf.call,
                "role": leaf.role,
                "orphan": leaf.orphan,
                "reward": None if outcome is None else outcome.reward,
                "status": None if outcome is None else outcome.status,
                "valid": outcome is not None and outcome.valid,
                "nodes": [node.id for node in leaf.nodes],
                "token_ids": path.token_ids,
                "calls": path.call,
                "indices": path.index,
                "logprobs": path.logprobs,
                "versions": path.versions,
            }
        )
    return rows


_TABLES: dict[str, Callable[[BranchGraph], list[Row]]] = {
    "nodes": node_rows,
    "calls": call_rows,
    "branches": branch_rows,
}


def _schemas(pa: Any) -> dict[str, Any]:
    text, ids, floats = pa.string(), pa.list_(pa.int32()), pa.list_(pa.float32())
    link = pa.struct([("kind", text), ("source", pa.int32()), ("reason", text), ("inferred", pa.bool_())])
    mark = pa.struct([("name", text), ("value", text)])  # no map: Hugging Face datasets have none
    int32, flag, real = pa.int32(), pa.bool_(), pa.float64()
    return {
        "nodes": pa.schema(
            [
                ("execution", text), ("node", text), ("parent", text), ("provenance", text), ("call", int32), ("offset", int32),
                ("start", int32), ("length", int32), ("owner", int32), ("role", text), ("orphan", flag), ("token_ids", ids),
                ("logprobs", floats), ("version_starts", ids), ("versions", ids),
            ]
        ),
        "calls": pa.schema(
            [
                ("execution", text), ("call", int32), ("state", text), ("role", text), ("dialect", text), ("at", real),
                ("first_token_at", real), ("done_at", real), ("prompt_tokens", int32), ("cached_tokens", int32),
                ("output_tokens", int32), ("finish", text), ("delivered", flag), ("engine", text), ("error", text),
                ("rerender", text), ("parent_call", int32), ("links", pa.list_(link)), ("marks", pa.list_(mark)),
                ("sampling", text),
            ]
        ),
        "branches": pa.schema(
            [
                ("execution", text), ("task", text), ("group", text), ("leaf", text), ("call", int32), ("role", text),
                ("orphan", flag), ("reward", real), ("status", text), ("valid", flag), ("nodes", pa.list_(text)),
                ("token_ids", ids), ("calls", ids), ("indices", ids), ("logprobs", floats), ("versions", ids),
            ]
        ),
    }  # fmt: skip
