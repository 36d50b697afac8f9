"""A tiny model and configurations on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("torch")

from gyre_backend.models import tiny_dir


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=1)


@pytest.fixture
def write_config(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """write_config(name, table={...}): defaults for a quick run, overridden table by table."""

    def write(name: str = "config", **tables: dict[str, Any]) -> Path:
        base: dict[str, dict[str, Any]] = {
            "model": {"path": str(tiny_model), "dtype": "float64"},
            "train": {"steps": 2, "group_size": 4, "groups_per_step": 2, "lr": 1e-3, "micro_tokens": 120},
            "cells": {"count": 1, "slots": 8, "hang_s": 60.0},
            "weights": {"transport": "mooncake"},
        }
        for table, values in tables.items():
            base[table] = {**base.get(table, {}), **values}
        path = tmp_path / f"{name}.toml"
        path.write_text(tomli_w.dumps(base))
        return path

    return write
