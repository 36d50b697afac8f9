"""Reader of the Harbor task format, schema 1.0 to 1.4."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from gyre_sdk.environments import dockerfile
from gyre_sdk.environments.sandbox.base import Limits, Network
from gyre_sdk.environments.task import Environment, Healthcheck, Phase, Step, Task, Verifier
from gyre_sdk.errors import TaskError

_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_variable = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
NetworkMode = Literal["public", "no-network", "allowlist"]


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class _HealthTable(_Table):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class _PhaseTable(_Table):
    timeout_sec: float | None = pydantic.Field(default=None, gt=0)
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class _AgentTable(_PhaseTable):
    pass


class _EnvironmentTable(_Table):
    build_timeout_sec: float = pydantic.Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = pydantic.Field(default=None, gt=0)
    memory_mb: int | None = pydantic.Field(default=None, gt=0)
    storage_mb: int | None = pydantic.Field(default=None, gt=0)
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    network_mode: NetworkMode | None = None
    allow_internet: bool | None = None
    allowed_hosts: list[str] | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: _HealthTable | None = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None


class _VerifierTable(_PhaseTable):
    timeout_sec: float | None = pydantic.Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _EnvironmentTable | None = None
    collect: list[Any] = []


class _SolutionTable(_Table):
    env: dict[str, str] = {}


class _TaskTable(_Table):
    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)
    name: str | None = None
    description: str = ""


class _StepTable(_Table):
    name: str
    agent: _AgentTable = _AgentTable()
    verifier: _VerifierTable | None = None
    min_reward: float | dict[str, float] | None = None
    healthcheck: _HealthTable | None = None
    artifacts: list[Any] = []


class _File(_Table):
    schema_version: str | None = None
    version: str | None = None
    source: str | None = None
    artifacts: list[Any] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    steps: list[_StepTable] = []
    task: _TaskTable = _TaskTable()
    metadata: dict[str, Any] = {}
    agent: _AgentTable = _AgentTable()
    verifier: _VerifierTable = _VerifierTable()
    environment: _EnvironmentTable = _EnvironmentTable()
    solution: _SolutionTable = _SolutionTable()

    @pydantic.model_validator(mode="after")
    def _known_version(self) -> _File:
        said = self.schema_version or self.version or "1.0"
        if said not in _VERSIONS:
            raise ValueError(f"schema_version {said!r} is not one that Gyre reads ({_VERSIONS[0]} to {_VERSIONS[-1]})")
        return self


def is_task(folder: Path) -> bool:
    """Whether `folder` is a Harbor task."""
    return (folder / "task.toml").is_file()


def load(folder: Path) -> Task:
    """Read one task. Raises TaskError that names the file and, where there is one, the key."""
    path = folder / "task.toml"
    file = _parse(path)
    environment = _environment(file.environment, folder / "environment", path, "environment")
    default_verifier = _verifier(file.verifier, folder / "tests", path, "verifier", folder)
    if file.steps:
        steps = tuple(_step(file, table, number, folder, path) for number, table in enumerate(file.steps))
    else:
        if not default_verifier.tests.joinpath("test.sh").is_file():
            raise TaskError(f"{folder / 'tests' / 'test.sh'}: missing; a task needs it to be graded")
        steps = (
            Step(
                name="main",
                instruction=_text(folder / "instruction.md"),
                agent=_phase(file.agent, path, "agent"),
                verifier=default_verifier,
                solution=_optional(folder / "solution"),
                artifacts=_artifacts(file.artifacts, path, "artifacts"),
            ),
        )
    return Task(
        name=(file.task.name or folder.name).rpartition("/")[2],
        folder=folder,
        kind="harbor",
        environment=environment,
        steps=steps,
        reward_strategy=file.multi_step_reward_strategy,
        artifacts=_artifacts(file.artifacts, path, "artifacts"),
        solution_env=_expanded(file.solution.env, path, "solution.env"),
        metadata=file.metadata,
    )


def _parse(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path}: not valid TOML: {error}") from error
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "file"
        what = "no such key" if problem["type"] == "extra_forbidden" else problem["msg"]
        raise TaskError(f"{path}: {key}: {what}") from error


def _step(file: _File, table: _StepTable, number: int, folder: Path, path: Path) -> Step:
    base = folder / "steps" / table.name
    key = f"steps.{number}"
    if not base.is_dir():
        raise TaskError(f"{path}: {key}.name: there is no folder {base}")
    verifier_table = table.verifier or file.verifier
    verifier = _verifier(verifier_table, base / "tests", path, f"{key}.verifier", folder)
    shared_tests = folder / "tests"
    if not (verifier.tests / "test.sh").is_file() and not (shared_tests / "test.sh").is_file():
        raise TaskError(f"{base / 'tests' / 'test.sh'}: missing; a step needs it to be graded")
    if not (verifier.tests / "test.sh").is_file():
        verifier = _verifier(verifier_table, shared_tests, path, f"{key}.verifier", folder)
    agent = table.agent
    if agent.timeout_sec is None:
        agent = agent.model_copy(update={"timeout_sec": file.agent.timeout_sec})
    if agent.user is None:
        agent = agent.model_copy(update={"user": file.agent.user})
    return Step(
        name=table.name,
        instruction=_text(base / "instruction.md"),
        agent=_phase(agent, path, f"{key}.agent"),
        verifier=verifier,
        solution=_optional(base / "solution"),
        workdir_files=_optional(base / "workdir"),
        min_reward=table.min_reward,
        healthcheck=_health(table.healthcheck),
        artifacts=_artifacts(table.artifacts, path, f"{key}.artifacts"),
    )


def _verifier(table: _VerifierTable, tests: Path, path: Path, key: str, folder: Path) -> Verifier:
    separate = None
    if table.environment_mode == "separate":
        own = table.environment or _EnvironmentTable()
        context = tests if (tests / "Dockerfile").is_file() else folder / "environment"
        separate = _environment(own, context, path, f"{key}.environment")
    elif table.environment is not None:
        raise TaskError(f'{path}: {key}.environment: only allowed with {key}.environment_mode = "separate"')
    phase = _phase(table, path, key)
    phase = Phase(phase.timeout_s, phase.user, phase.network, _expanded(table.env, path, f"{key}.env"))
    return Verifier(
        tests=tests, phase=phase, separate=separate, collect=_commands(table.collect, path, f"{key}.collect")
    )


def _phase(table: _PhaseTable, path: Path, key: str) -> Phase:
    network = None
    if table.network_mode is not None:
        network = _network(table.network_mode, table.allowed_hosts, path, key)
    return Phase(table.timeout_sec, None if table.user is None else str(table.user), network)


def _network(mode: NetworkMode, hosts: list[str] | None, path: Path, key: str) -> Network:
    if mode == "allowlist":
        if not hosts:
            raise TaskError(f'{path}: {key}.allowed_hosts: needed with network_mode = "allowlist"')
        return Network("allow-list", tuple(hosts))
    return Network("on" if mode == "public" else "off")


def _environment(table: _EnvironmentTable, context: Path, path: Path, key: str) -> Environment:
    mode: NetworkMode = table.network_mode or ("no-network" if table.allow_internet is False else "public")
    memory = table.memory_mb if table.memory_mb is not None else _size_mb(table.memory, path, f"{key}.memory")
    storage = table.storage_mb if table.storage_mb is not None else _size_mb(table.storage, path, f"{key}.storage")
    default = Limits()
    needs = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).is_file()]
    if table.gpus:
        needs.append("gpus")
    if table.tpu:
        needs.append("tpu")
    if table.os != "linux":
        needs.append(f"os = {table.os}")
    has_file = (context / "Dockerfile").is_file()
    workdir = table.workdir or (dockerfile.workdir(context / "Dockerfile") if has_file else None)
    return Environment(
        folder=context if has_file else None,
        image=table.docker_image,
        workdir=workdir,
        env=_expanded(table.env, path, f"{key}.env"),
        limits=Limits(
            cpus=table.cpus,
            memory_mb=memory if memory is not None else default.memory_mb,
            pids=default.pids,
            disk_mb=storage if storage is not None else default.disk_mb,
        ),
        network=_network(mode, table.allowed_hosts, path, key),
        build_timeout_s=table.build_timeout_sec,
        healthcheck=_health(table.healthcheck),
        needs=tuple(needs),
    )


def _health(table: _HealthTable | None) -> Healthcheck | None:
    if table is None:
        return None
    return Healthcheck(table.command, table.interval_sec, table.timeout_sec, table.start_period_sec, table.retries)


def _size_mb(text: str | None, path: Path, key: str) -> int | None:
    """'2G', '512M', '1.5GB' in MiB."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B?)?\s*", text, re.IGNORECASE)
    if match is None:
        raise TaskError(f'{path}: {key}: {text!r} is no size; write it like "2G" or "512M"')
    factor = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}[match.group(2).upper()]
    return max(1, int(float(match.group(1)) * factor))


def _expanded(env: Mapping[str, str], path: Path, key: str) -> dict[str, str]:
    """Values with ${NAME} and ${NAME:-default} filled from this process's environment."""

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        found = os.environ.get(name, default)
        if found is None:
            raise TaskError(f"{path}: {key}: ${{{name}}} is not set, and has no default")
        return found

    return {name: _variable.sub(value, text) for name, text in env.items()}


def _artifacts(items: list[Any], path: Path, key: str) -> tuple[str, ...]:
    """Paths inside the sandbox; an item is a path or a table with `source`."""
    found = []
    for item in items:
        source = item if isinstance(item, str) else item.get("source") if isinstance(item, dict) else None
        if not isinstance(source, str):
            raise TaskError(f"{path}: {key}: an artifact is a path, or a table with `source`")
        found.append(source)
    return tuple(found)


def _commands(items: list[Any], path: Path, key: str) -> tuple[str, ...]:
    found = []
    for item in items:
        command = item if isinstance(item, str) else item.get("command") if isinstance(item, dict) else None
        if not isinstance(command, str):
            raise TaskError(f"{path}: {key}: an entry is a command, or a table with `command`")
        found.append(command)
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: can't be read: {error}") from error


def _optional(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None
