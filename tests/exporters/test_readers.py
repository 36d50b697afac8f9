"""The Parquet tables in the hands of pandas, polars, duckdb and datasets. `make test-monitors` (the same environment)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_sdk.exporters import export
from tests.exporters.examples import example
from tests.graph.programs import Harness

pytestmark = [pytest.mark.monitors, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    graphs = iter([example(), Harness().graph])
    return {path.stem: path for path in export("parquet", graphs, tmp_path_factory.mktemp("parquet"))}


@pytest.fixture(scope="module")
def branch() -> dict[str, Any]:
    """What call 4's branch must be."""
    leaf = next(leaf for leaf in example().leaves() if leaf.call == 4)
    path = leaf.path()
    return {"leaf": leaf.id, "role": "main-summary", "tokens": path.token_ids, "logprobs": path.logprobs}


def test_pandas(tables: dict[str, Path], branch: dict[str, Any]) -> None:
    import pandas as pd

    frame = pd.read_parquet(tables["branches"])
    (row,) = frame[frame["call"] == 4].to_dict("records")
    assert row["leaf"] == branch["leaf"]
    assert row["role"] == branch["role"]
    assert row["token_ids"].dtype == np.int32
    np.testing.assert_array_equal(row["token_ids"], branch["tokens"])
    np.testing.assert_array_equal(row["logprobs"], branch["logprobs"])
    calls = pd.read_parquet(tables["calls"])
    assert calls.set_index("call").loc[3, "links"][0]["kind"] == "retries"
    nodes = pd.read_parquet(tables["nodes"])
    assert nodes["length"].sum() == example().unique_tokens


def test_polars(tables: dict[str, Path], branch: dict[str, Any]) -> None:
    import polars as pl

    frame = pl.read_parquet(tables["branches"])
    row = frame.filter(pl.col("call") == 4).row(0, named=True)
    assert row["token_ids"] == branch["tokens"].tolist()
    assert frame.schema["token_ids"] == pl.List(pl.Int32)
    assert frame.schema["logprobs"] == pl.List(pl.Float32)
    calls = pl.read_parquet(tables["calls"])
    assert calls.filter(pl.col("call") == 3)["links"][0][0]["kind"] == "retries"
    by_provenance = pl.read_parquet(tables["nodes"]).group_by("provenance").agg(pl.col("length").sum())
    assert by_provenance["length"].sum() == example().unique_tokens


def test_duckdb(tables: dict[str, Path], branch: dict[str, Any]) -> None:
    import duckdb

    query = f"SELECT leaf, token_ids, len(token_ids) FROM '{tables['branches']}' WHERE call = 4"
    ((leaf, tokens, length),) = duckdb.sql(query).fetchall()
    assert (leaf, tokens, length) == (branch["leaf"], branch["tokens"].tolist(), len(branch["tokens"]))
    retries = duckdb.sql(
        f"SELECT call, link.source FROM (SELECT call, unnest(links) AS link FROM '{tables['calls']}') WHERE link.kind = 'retries'"
    ).fetchall()
    assert retries == [(3, 2)]
    joined = f"SELECT count(*) FROM '{tables['nodes']}' n JOIN '{tables['calls']}' c USING (execution, call)"
    assert duckdb.sql(joined).fetchall() == [(sum(node.call >= 0 for node in example().nodes.values()),)]


def test_datasets(tables: dict[str, Path], branch: dict[str, Any], tmp_path: Path) -> None:
    import datasets

    loaded = datasets.load_dataset(
        "parquet", data_files=str(tables["branches"]), split="train", cache_dir=str(tmp_path)
    )
    (row,) = [row for row in loaded if row["call"] == 4]
    assert row["token_ids"] == branch["tokens"].tolist()
    assert loaded.features["logprobs"].feature.dtype == "float32"
    for name in ("calls", "nodes"):
        assert len(
            datasets.load_dataset("parquet", data_files=str(tables[name]), split="train", cache_dir=str(tmp_path))
        )


def test_samples_as_json_lines_are_a_dataset_too(tmp_path: Path) -> None:
    import datasets

    (path,) = export("samples", [example()], tmp_path / "out")
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert all(len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"]) for row in loaded)
    assert loaded[0]["messages"][0]["role"] == "system"
