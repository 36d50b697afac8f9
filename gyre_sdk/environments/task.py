"""A task: instruction, environment and verifier, whatever format it was written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gyre_sdk.environments.sandbox.base import Limits, Network


@dataclass(frozen=True, slots=True)
class Phase:
    """Who runs one phase (agent, verifier) of a task, for how long, and what network it may use."""

    timeout_s: float | None = None
    user: str | None = None
    network: Network | None = None
    """None: the environment's."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A command that must succeed before the agent starts. Times in seconds."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class Environment:
    """What the sandbox is made of."""

    folder: Path | None = None
    """Build context with a Dockerfile, if there is one."""
    image: str | None = None
    """Prebuilt image, for container backends."""
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: Network = field(default_factory=Network)
    build_timeout_s: float = 600.0
    healthcheck: Healthcheck | None = None
    needs: tuple[str, ...] = ()
    """What only a container engine (or more) can give: 'docker-compose.yaml', 'gpus' ..."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """How the workspace is graded."""

    tests: Path
    phase: Phase = field(default_factory=lambda: Phase(timeout_s=600.0))
    separate: Environment | None = None
    """A fresh sandbox for the verifier, to which only artifacts travel; None: it runs where the agent worked."""
    collect: tuple[str, ...] = ()
    """Commands run in the agent's sandbox before artifacts are taken for a separate verifier."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a task; a plain task has one."""

    name: str
    instruction: str
    agent: Phase
    verifier: Verifier
    solution: Path | None
    workdir_files: Path | None = None
    """Files copied into the working directory before the step; its setup.sh is run there."""
    min_reward: float | Mapping[str, float] | None = None
    """The steps after this one are skipped when its reward is lower."""
    healthcheck: Healthcheck | None = None
    artifacts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepoSpec:
    """The NL2Repo part of a task: how the hidden tests are run and counted."""

    commands: tuple[str, ...]
    remove: tuple[str, ...]
    """Paths of the candidate that hidden files take the place of."""
    declared: int
    """Number of test cases: the denominator, fixed when the task was written."""
    hidden: Path | None = None
    """Folder with the hidden tests and packaging files; None: only in the task's image, or fetched (sdist variant)."""
    packages: tuple[str, ...] = ()
    """Paths that are the implementation: only these are taken from the candidate. Empty: everything but test machinery."""
    variant: Literal["image", "folder", "sdist"] = "image"
    image: str | None = None
    """The official image, where the hidden tests are only in there."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task as the runner sees it. `steps` has at least one."""

    name: str
    folder: Path
    kind: Literal["harbor", "nl2repo"]
    environment: Environment
    steps: tuple[Step, ...]
    reward_strategy: Literal["mean", "final"] = "mean"
    artifacts: tuple[str, ...] = ()
    solution_env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    repo: RepoSpec | None = None

    @property
    def instruction(self) -> str:
        """What the agent is asked; of a task with several steps, the first step's."""
        return self.steps[0].instruction

    @property
    def format(self) -> str:
        """The layout it was read from: 'harbor' or 'nl2repo'."""
        return self.kind

    @property
    def network(self) -> str:
        """The agent's network policy: off, on or allow-list."""
        return (self.steps[0].agent.network or self.environment.network).mode

    def only(self, step: Step) -> Task:
        """The same task with one step of it: what the agent of that step is given."""
        return replace(self, steps=(step,))

    @property
    def workdir(self) -> str:
        """Where the agent works inside the sandbox."""
        return self.environment.workdir or "/app"

    @property
    def agent_timeout_s(self) -> float | None:
        """The task's own limit on the agent's time: the sum over its steps."""
        limits = [step.agent.timeout_s for step in self.steps if step.agent.timeout_s is not None]
        return sum(limits) if len(limits) == len(self.steps) else None
