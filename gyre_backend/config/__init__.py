"""The backend's configuration: one TOML file, read once, refused with one clear line when a key is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pydantic

from gyre_backend.config.tables import (
    AlgorithmTable,
    CellsTable,
    EngineTable,
    ModelTable,
    MonitorsTable,
    RouterTable,
    SchedulerTable,
    Table,
    TrainTable,
    WeightsTable,
)
from gyre_sdk.errors import ConfigError, explain_problems

OTHER_SIDE = ("run", "sampling")
"""Tables of the same file that belong to the SDK's side; only `run.group_size` and `sampling.temperature`
matter here.
"""


class BackendConfig(Table):
    """All tables of the backend's side."""

    model: ModelTable = ModelTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    train: TrainTable = TrainTable()
    scheduler: SchedulerTable = SchedulerTable()
    cells: CellsTable = CellsTable()
    engine: EngineTable = EngineTable()
    router: RouterTable = RouterTable()
    weights: WeightsTable = WeightsTable()
    monitors: MonitorsTable = MonitorsTable()

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> BackendConfig:
        if self.engine.url and self.cells.count > 1:
            raise ValueError("engine.url names one server, so cells.count must be 1")
        if self.engine.url and self.engine.kind != "sglang":
            raise ValueError("engine.url needs engine.kind = 'sglang'")
        return self


def parse_config(data: dict[str, Any], source: str = "config") -> BackendConfig:
    """From a TOML document. Raises ConfigError naming the first wrong key and what was expected."""
    tables = {name: table for name, table in data.items() if name not in OTHER_SIDE}
    for table, key in (("run", "group_size"), ("sampling", "temperature")):
        other = data.get(table)
        if isinstance(other, dict) and key in other:
            train = dict(tables.get("train") or {})
            if train.setdefault(key, other[key]) != other[key]:
                raise ConfigError(f"{source}: {table}.{key} and train.{key} differ; give one of them")
            tables["train"] = train
    try:
        return BackendConfig.model_validate(tables)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{source}: {explain_problems(BackendConfig, error.errors())}") from error


def load_config(path: Path) -> BackendConfig:
    """Read a TOML file. Raises ConfigError."""
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; a TOML file is wanted") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(data, str(path))


__all__ = [
    "AlgorithmTable",
    "BackendConfig",
    "CellsTable",
    "EngineTable",
    "ModelTable",
    "MonitorsTable",
    "RouterTable",
    "SchedulerTable",
    "TrainTable",
    "WeightsTable",
    "load_config",
    "parse_config",
]
