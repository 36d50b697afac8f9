"""ATIF as Harbor's own models read it. Needs a Python >= 3.12 with Harbor, named by $GYRE_HARBOR_PYTHON (`make test-harbor`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gyre_sdk.exporters import export, from_atif
from gyre_sdk.exporters.atif import to_atif, to_json
from gyre_sdk.graph import BranchGraph
from tests.exporters.examples import example
from tests.exporters.test_atif_import import assert_same_branches
from tests.graph.programs import Harness, program_of

pytestmark = [pytest.mark.harbor, pytest.mark.timeout(300)]

CHECK = """
import json, sys
from pathlib import Path
from harbor.models.trajectories import Trajectory

for name in sys.argv[2:]:
    text = Path(name).read_text()
    read = Trajectory.model_validate_json(text)
    # What Harbor writes again holds everything that we wrote: it dropped and invented nothing.
    Path(sys.argv[1], Path(name).name).write_text(json.dumps(read.to_json_dict()))
print(json.dumps({"documents": len(sys.argv) - 2}))
"""


@pytest.fixture(scope="module")
def harbor_python() -> str:
    named = os.environ.get("GYRE_HARBOR_PYTHON")
    if not named:
        pytest.skip("set GYRE_HARBOR_PYTHON to a Python >= 3.12 that has Harbor")
    return named


def through_harbor(python: str, paths: list[Path], out: Path) -> list[Path]:
    """The documents as Harbor's models write them after reading them."""
    out.mkdir()
    argv = [python, "-c", CHECK, str(out), *map(str, paths)]
    env = os.environ | {"HARBOR_TELEMETRY": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"documents": len(paths)}
    return [out / path.name for path in paths]


def test_harbor_reads_our_documents_and_they_come_back(harbor_python: str, tmp_path: Path) -> None:
    graph = example()
    paths = export("atif", [graph], tmp_path / "ours")
    again = through_harbor(harbor_python, paths, tmp_path / "theirs")
    (imported,) = from_atif(path.read_bytes() for path in again)
    assert_same_branches(graph, BranchGraph.replay(imported.records))


def test_harbor_reads_documents_of_many_graphs(harbor_python: str, tmp_path: Path) -> None:
    paths: list[Path] = []
    for seed in range(40):
        data = bytes((seed * 37 + place * place * 11) % 256 for place in range(120))
        for document in to_atif(Harness().run(program_of(data)).graph):
            path = tmp_path / f"{seed}-{len(paths)}.json"
            path.write_bytes(to_json(document))
            paths.append(path)
    assert len(paths) > 40
    through_harbor(harbor_python, paths, tmp_path / "theirs")


def test_a_wrong_document_is_refused(harbor_python: str, tmp_path: Path) -> None:
    """That the check can fail."""
    (path,) = export("atif", [example()], tmp_path / "ours")[:1]
    document = json.loads(path.read_text())
    document["steps"][0]["step_id"] = 7
    path.write_text(json.dumps(document))
    with pytest.raises(AssertionError, match="step_id"):
        through_harbor(harbor_python, [path], tmp_path / "theirs")
