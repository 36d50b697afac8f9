"""The cell's side of an SGLang server, against a server that speaks the contract and keeps its own weights."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre_backend.cells.engine_side import SGLangSide
from gyre_backend.config import parse_config
from gyre_backend.engines.embedded import EmbeddedEngine, load_model
from gyre_backend.errors import WeightsError
from gyre_backend.models import tiny_dir
from tests.engines.served import serving

pytestmark = pytest.mark.anyio


class Exporter:
    """A trainer as far as this side sees one: a version, and a folder with its weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0

    def export_hf(self, path: Path) -> None:
        shutil.copytree(self.folder, path)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    return tiny_dir(tmp_path / "a", seed=1), tiny_dir(tmp_path / "b", seed=2)


@pytest.fixture
async def made(models: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[tuple[SGLangSide, Exporter, EmbeddedEngine]]:
    engine = EmbeddedEngine(load_model(models[0]), version=0, model_path=str(models[0]))
    with serving(engine.app()) as url:
        config = parse_config({"model": {"path": str(models[0])}, "engine": {"kind": "sglang", "url": url}}, "test")
        trainer = Exporter(models[0])
        side = SGLangSide(trainer, config, models[0], tmp_path / "work")  # type: ignore[arg-type]
        await side.start()
        yield side, trainer, engine
        await side.aclose()
    engine.close()


async def test_weights_come_by_folder_and_are_checked(
    made: tuple[SGLangSide, Exporter, EmbeddedEngine], models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    side, trainer, engine = made
    before = engine.checksum()
    trainer.folder = models[1]
    await side.release()
    await side.take(1)
    await side.resume()
    assert engine.version == "1"
    assert engine.checksum() != before
    await side.freeze()
    await side.take(2)
    assert engine.version == "2"
    assert not caplog.records


async def test_other_weights_from_equal_files_are_refused(
    made: tuple[SGLangSide, Exporter, EmbeddedEngine], models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers an update and holds something else: the checksum says so, and it stays paused."""
    side, _, engine = made
    monkeypatch.setattr(engine, "load_from_disk", lambda folder: EmbeddedEngine.load_from_disk(engine, str(models[1])))
    await side.freeze()
    with pytest.raises(WeightsError, match="holds weights"):
        await side.take(1)
    assert engine.core.paused


async def test_an_update_that_did_nothing_is_seen(
    made: tuple[SGLangSide, Exporter, EmbeddedEngine],
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    side, trainer, engine = made
    monkeypatch.setattr(engine, "load_from_disk", lambda folder: None)
    trainer.folder = models[1]
    await side.freeze()
    await side.take(1)
    assert "same weights after an update" in caplog.text
