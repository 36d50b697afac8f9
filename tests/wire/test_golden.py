"""Every version ever written is read, and the present one is written byte for byte as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_sdk.graph import BranchGraph
from gyre_sdk.wire import WalReader, decode, encode, file_header, verify
from gyre_sdk.wire.records import VERSION
from tests.golden.generate import EXAMPLES, FOLDER, log_records

# One line for each version: the digest of the graph of its log.
DIGESTS = {1: "7177cdb4c5997ffc1ecfda30e1d3403d"}


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_every_version_is_read(version: int) -> None:
    folder = FOLDER / f"v{version}"
    names = sorted(path.stem for path in folder.glob("*.frame"))
    assert names
    for name in names:
        _, record = decode((folder / f"{name}.frame").read_bytes())
        assert record == EXAMPLES[name]
    log = folder / "log.gyre"
    assert verify(log).ok
    records = [frame.record() for frame in WalReader(log).frames()]
    assert records == log_records()
    assert BranchGraph.replay(records).digest() == DIGESTS[version]


def test_every_record_type_has_golden_bytes() -> None:
    from gyre_sdk.wire.records import Record

    assert {type(record) for record in EXAMPLES.values()} == set(Record.__args__)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_writer_has_not_changed(name: str) -> None:
    seq = list(EXAMPLES).index(name)
    assert encode(EXAMPLES[name], seq) == (FOLDER / f"v{VERSION}" / f"{name}.frame").read_bytes()


def test_the_file_header_has_not_changed(tmp_path: Path) -> None:
    assert (FOLDER / f"v{VERSION}" / "log.gyre").read_bytes().startswith(file_header())
