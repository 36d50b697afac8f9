"""The hardened grader: hidden tests over the candidate's code in a fresh sandbox, counted from JUnit against a fixed denominator."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.environments.nl2repo import candidate, junit
from gyre_sdk.environments.nl2repo.pins import PYTEST, Pin, pins
from gyre_sdk.environments.nl2repo.workshop import Workshop, sdist, workshop
from gyre_sdk.environments.sandbox import choose
from gyre_sdk.environments.sandbox.base import DEFAULT_PATH, Limits, Network, Sandbox, SandboxSpec
from gyre_sdk.environments.task import RepoSpec, Task
from gyre_sdk.errors import SandboxError

WORKDIR = "/workspace"
_OUT = "/logs/verifier/out"
_PLUGIN_AT = "/opt/gyre-grader"
_WORKSPACE_MB = 256
_OUTPUT = "test-stdout.txt"


class GraderFailed(Exception):
    """The tests could not be run to an end; not the policy's doing."""


@dataclass(frozen=True, slots=True)
class RepoGrade:
    """passed / declared, and what it was made of."""

    reward: float
    metrics: dict[str, float]
    message: str = ""


async def verify_repo(task: Task, sandbox: Sandbox, kept: Path, timeout_s: float) -> RepoGrade:
    """Grade what the agent's sandbox holds. Raises GraderFailed or SandboxError."""
    spec = task.repo
    if spec is None:
        raise ValueError(f"{task.name} is no NL2Repo task")
    await sandbox.kill_all()
    with tempfile.TemporaryDirectory(prefix="gyre-repo-") as folder:
        workspace = Path(folder) / "workspace"
        try:
            await sandbox.download(task.workdir, workspace, limit_mb=_WORKSPACE_MB)
        except SandboxError as error:
            if "larger than" in str(error):
                return RepoGrade(
                    0.0, {"declared": float(spec.declared)}, f"the workspace is larger than {_WORKSPACE_MB} MiB"
                )
            raise
        return await verify_folder(task, workspace, kept, timeout_s, backend=sandbox.backend)


async def verify_folder(task: Task, workspace: Path, kept: Path, timeout_s: float, *, backend: str) -> RepoGrade:
    """Grade a candidate's folder. Raises GraderFailed or SandboxError."""
    spec = task.repo
    assert spec is not None
    if spec.variant == "image":
        raise SandboxError(
            f"{task.name}: its hidden tests are only in the image {spec.image}; that needs docker or podman"
        )
    pin = pins()[task.name.lower()] if spec.variant == "sdist" else None
    hidden = await _hidden(spec, pin, backend)
    shop = await workshop(pin.environment if pin is not None else (PYTEST,))
    canary = f"test_{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="gyre-grade-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        files = candidate.select(workspace, tree, packages=spec.packages, remove=spec.remove)
        _lay_over(hidden, spec, pin, tree)
        (tree / f"test_gyre_{canary}.py").write_text(f"def {canary}():\n    assert False, 'this test must fail'\n")
        await _run(task, spec, pin, tree, kept, shop, canary, timeout_s, backend)
    return _judge(spec, kept, canary, files)


async def _hidden(spec: RepoSpec, pin: Pin | None, backend: str) -> Path:
    if pin is not None:
        return await sdist(pin, backend)
    assert spec.hidden is not None
    return spec.hidden


def _lay_over(hidden: Path, spec: RepoSpec, pin: Pin | None, tree: Path) -> None:
    """Hidden tests and packaging files come last: nothing of the candidate's stays in their place."""
    if pin is None:
        shutil.copytree(hidden, tree, dirs_exist_ok=True)
        return
    for path in pin.tests:
        source, place = hidden / path, tree / path
        if place.is_dir():
            shutil.rmtree(place)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
        else:
            raise SandboxError(f"{pin.package} {pin.version} has no {path}")


async def _run(
    task: Task,
    spec: RepoSpec,
    pin: Pin | None,
    tree: Path,
    kept: Path,
    shop: Workshop,
    canary: str,
    timeout_s: float,
    backend: str,
) -> None:
    """Run the commands in a fresh sandbox without network, as nobody; reports and output go to `kept`."""
    plugin = Path(__file__).parent / "gyre_grader.py"
    sandbox = choose.create(
        SandboxSpec(
            name=f"{task.name}-verifier",
            workdir=WORKDIR,
            limits=Limits(memory_mb=task.environment.limits.memory_mb, disk_mb=2048),
            network=Network("off"),
            read_only_mounts={**shop.mounts, plugin: f"{_PLUGIN_AT}/gyre_grader.py"},
        ),
        backend,
    )
    told = []
    try:
        await sandbox.start()
        await sandbox.upload(tree, WORKDIR)
        # The folder is anybody's, its files are root's: tests may write beside, code under test can't rewrite the tests.
        await sandbox.exec(
            f"chmod 1777 {WORKDIR}; mkdir -p {_OUT} /tmp/home; chmod 1777 {_OUT} /tmp/home", cwd="/", user="root"
        )
        for number, command in enumerate(spec.commands):
            result = await sandbox.exec(
                command,
                env={
                    **_environment(shop, number, _source_roots(spec)),
                    "GYRE_CANARY": f"{WORKDIR}/test_gyre_{canary}.py",
                },
                timeout=timeout_s,
                user="nobody",
            )
            told.append(f"$ {command}\n{result.stdout}{result.stderr}")
            if result.timed_out:
                raise GraderFailed(f"{command!r} ran into its timeout of {timeout_s:g} s")
        await sandbox.kill_all()
        await sandbox.download("/logs/verifier", kept)
    finally:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / _OUTPUT).write_text("\n".join(told))
        await sandbox.stop()


def _source_roots(spec: RepoSpec) -> str:
    """PYTHONPATH that stands for an installation: the root, and src or lib where packages lie in there."""
    roots = [WORKDIR]
    for path in spec.packages or ("src/x", "lib/x"):
        top = Path(path).parts[0]
        if top in ("src", "lib") and f"{WORKDIR}/{top}" not in roots:
            roots.append(f"{WORKDIR}/{top}")
    return ":".join([*reversed(roots), _PLUGIN_AT])


def _environment(shop: Workshop, number: int, roots: str) -> dict[str, str]:
    report = f"--junitxml={_OUT}/junit-{number}.xml"
    return {
        "PATH": f"{shop.venv}/bin:{DEFAULT_PATH}",
        "HOME": "/tmp/home",
        "PYTHONPATH": roots,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": f"-p gyre_grader -p no:cacheprovider -o junit_family=xunit2 {report} --confcutdir={WORKDIR}",
        "PIP_NO_INDEX": "1",
        "GYRE_TEST_LIMIT_S": os.environ.get("GYRE_TEST_LIMIT_S", "60"),
    }


def _judge(spec: RepoSpec, kept: Path, canary: str, files: int) -> RepoGrade:
    """Count every report. No report is 0: the code could not even be imported."""
    total, reports = junit.Counts(), 0
    for path in sorted((kept / "out").glob("junit-*.xml")):
        counted = junit.count(path, canary)
        if counted is None or counted.canary_passed or not counted.canary_failed:
            continue
        total, reports = total + counted, reports + 1
    reward = min(total.passed / spec.declared, 1.0)
    metrics = {
        "passed": float(total.passed),
        "failed": float(total.failed),
        "skipped": float(total.skipped),
        "declared": float(spec.declared),
        "reports": float(reports),
        "files": float(files),
    }
    return RepoGrade(reward, metrics)
