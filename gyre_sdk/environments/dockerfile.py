"""The part of Dockerfiles that can be replayed without a container engine."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import TaskError

_SILENT = frozenset({"LABEL", "EXPOSE", "MAINTAINER", "CMD", "STOPSIGNAL"})
"""Without effect on a sandbox whose commands are given by the runner."""
_KNOWN = frozenset({"FROM", "RUN", "COPY", "ADD", "ENV", "WORKDIR", "USER", "ARG"})
_PLAIN_BASES = ("debian", "ubuntu", "python", "buildpack-deps")
"""Bases for which this machine's own system (or a named root file system) stands in."""
_variable = re.compile(r"\\\$|\$(?:\{([A-Za-z_]\w*)(?:(:?[-+])([^}]*))?\}|([A-Za-z_]\w*))")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: run a command, or copy files from the build context."""

    kind: str
    """'run', 'copy' or 'mkdir'."""
    workdir: str
    user: str | None
    env: Mapping[str, str]
    command: str = ""
    sources: tuple[str, ...] = ()
    target: str = ""
    chmod: str = ""
    chown: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Dockerfile, read."""

    base: str
    actions: tuple[Action, ...]
    env: Mapping[str, str]
    workdir: str
    user: str | None

    def digest(self, context: Path) -> str:
        """Names what the recipe makes: its actions and every file it copies."""
        sha = hashlib.sha256(repr((self.base, self.actions)).encode())
        for action in self.actions:
            for source in action.sources:
                for path in sorted(_walk(context / source)):
                    sha.update(f"{path.relative_to(context)} {path.stat().st_mode:o}\n".encode())
                    sha.update(path.read_bytes())
        return sha.hexdigest()[:20]


def _walk(path: Path) -> list[Path]:
    if path.is_dir():
        return [found for found in path.rglob("*") if found.is_file()]
    return [path] if path.is_file() else []


def workdir(path: Path) -> str | None:
    """The last WORKDIR, read without judging the rest. None when there is none."""
    found = None
    for word, rest, _ in _instructions(path):
        if word == "WORKDIR":
            part = rest.strip().strip("\"'")
            found = part if part.startswith("/") else f"{found or ''}/{part}"
    return found


def read(path: Path) -> Recipe:
    """Read a Dockerfile. Raises TaskError: 'needs docker or podman' for what can't be replayed, with the line."""
    state = _State(path)
    for word, rest, line in _instructions(path):
        state.take(word, rest, line)
    if state.base is None:
        raise TaskError(f"{path}: no FROM")
    return Recipe(state.base, tuple(state.actions), dict(state.env), state.workdir, state.user)


def _instructions(path: Path) -> list[tuple[str, str, int]]:
    """(INSTRUCTION, rest, line number). Continuation lines join; comments and empty lines inside them vanish."""
    found: list[tuple[str, str, int]] = []
    pending, start = "", 0
    for number, raw in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if raw.lstrip().startswith("#") or (not raw.strip() and pending):
            continue
        if not raw.strip():
            continue
        start = start or number
        if raw.rstrip().endswith("\\"):
            pending += raw.rstrip()[:-1]
            continue
        word, _, rest = (pending + raw).strip().partition(" ")
        found.append((word.upper(), rest.strip(), start))
        pending, start = "", 0
    if pending:
        word, _, rest = pending.strip().partition(" ")
        found.append((word.upper(), rest.strip(), start))
    return found


class _State:
    """What a Dockerfile has said so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base: str | None = None
        self.workdir = "/"
        self.user: str | None = None
        self.env: dict[str, str] = {}
        self.args: dict[str, str] = {}
        self.actions: list[Action] = []

    def refuse(self, line: int, what: str) -> TaskError:
        return TaskError(f"{self.path}:{line}: {what} needs docker or podman")

    def take(self, word: str, rest: str, line: int) -> None:
        if word in _SILENT:
            return
        if word not in _KNOWN:
            raise self.refuse(line, word)
        if word != "ARG" and word != "FROM" and self.base is None:
            raise TaskError(f"{self.path}:{line}: {word} before FROM")
        handler = self._added if word == "ADD" else getattr(self, "_" + word.lower())
        handler(rest, line)

    def expand(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1) or match.group(4)
            if name is None:
                return "$"
            found = self.env.get(name, self.args.get(name))
            operator, word = match.group(2), match.group(3) or ""
            if operator and operator.endswith("+"):
                return word if found else ""
            if operator and (found is None or (operator.startswith(":") and not found)):
                return word
            return found or ""

        return _variable.sub(value, text)

    def _from(self, rest: str, line: int) -> None:
        if self.base is not None:
            raise self.refuse(line, "a second FROM (multi-stage build)")
        words = [word for word in self.expand(rest).split() if not word.startswith("--platform")]
        image = words[0].removeprefix("docker.io/").removeprefix("library/")
        name = image.partition("@")[0].partition(":")[0]
        if name not in _PLAIN_BASES:
            raise self.refuse(line, f"FROM {words[0]} (only {', '.join(_PLAIN_BASES)} have a stand-in)")
        self.base = image

    def _arg(self, rest: str, line: int) -> None:
        for word in shlex.split(rest):
            name, equals, value = word.partition("=")
            if equals:
                self.args[name] = self.expand(value)
            else:
                self.args.setdefault(name, "")

    def _env(self, rest: str, line: int) -> None:
        first, _, other = rest.partition(" ")
        if "=" not in first:
            self.env[first] = self.expand(other.strip())
            return
        for word in shlex.split(rest.replace("\\$", "\\\\$")):
            name, _, value = word.partition("=")
            self.env[name] = self.expand(value)

    def _workdir(self, rest: str, line: int) -> None:
        part = self.expand(rest.strip().strip("\"'"))
        self.workdir = part if part.startswith("/") else f"{self.workdir.rstrip('/')}/{part}"
        self._record("mkdir", target=self.workdir)

    def _user(self, rest: str, line: int) -> None:
        self.user = self.expand(rest.strip()).partition(":")[0]

    def _run(self, rest: str, line: int) -> None:
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            rest = rest.lstrip()
            if not flag.startswith(("--mount=type=cache", "--network=", "--mount=type=tmpfs")):
                raise self.refuse(line, f"RUN {flag}")
        if re.match(r"<<-?\s*['\"]?\w", rest):
            raise self.refuse(line, "RUN with a here-document")
        if rest.startswith("["):
            try:
                words = json.loads(rest)
            except ValueError:
                words = None
            if isinstance(words, list):
                rest = shlex.join(str(word) for word in words)
        self._record("run", command=rest)

    def _copy(self, rest: str, line: int) -> None:
        self._copied(rest, line, "COPY")

    def _added(self, rest: str, line: int) -> None:
        self._copied(rest, line, "ADD")

    def _copied(self, rest: str, line: int, word: str) -> None:
        options = {"chmod": "", "chown": ""}
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            name, _, value = flag.removeprefix("--").partition("=")
            if name not in options and name != "link":
                raise self.refuse(line, f"{word} --{name}")
            if name in options:
                options[name] = self.expand(value)
            rest = rest.lstrip()
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        words = [self.expand(str(part)) for part in words]
        if len(words) < 2:
            raise TaskError(f"{self.path}:{line}: {word} needs a source and a target")
        sources, target = words[:-1], words[-1]
        for source in sources:
            if "://" in source or source.startswith("git@"):
                raise self.refuse(line, f"{word} {source}")
            if word == "ADD" and re.search(r"\.(tar|tgz|tbz2|txz)(\.\w+)?$", source):
                raise self.refuse(line, f"ADD of the archive {source}")
            if ".." in Path(source).parts:
                raise TaskError(f"{self.path}:{line}: {word} {source} leaves the build context")
        if not target.startswith("/"):
            slash = "/" if target.endswith(("/", ".")) else ""
            target = f"{self.workdir.rstrip('/')}/{target.removeprefix('./').rstrip('.')}".rstrip("/") + slash
        self._record("copy", sources=tuple(source.lstrip("/") or "." for source in sources), target=target, **options)

    def _record(self, kind: str, **fields: object) -> None:
        settings = {"workdir": self.workdir, "user": self.user, "env": {**self.args, **self.env}} | fields
        self.actions.append(Action(kind=kind, **settings))  # type: ignore[arg-type]
