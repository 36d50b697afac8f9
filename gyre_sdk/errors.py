"""Every exception that Gyre's SDK raises on purpose.

GyreError
├── ConfigError(ValueError)        a setting, file or argument of the user's is wrong; the message says which and what was expected
├── MissingExtraError(ImportError) an optional dependency is needed; names the extra and the command
├── TaskError(ValueError)          a task folder is malformed; names file and key
├── SandboxError                   a sandbox could not be started, used or stopped
├── HarnessError                   a harness could not be started or broke in a way that is not the policy's doing
├── EngineError                    an engine or router refused, failed or vanished
│   ├── ContextOverflowError       prompt (+ reply) longer than the model's context
│   └── EngineGoneError            no answer: connection refused, reset, or cut in mid-stream
├── RequestError(ValueError)       a harness's request can't be served as it stands; carries an HTTP status
│   ├── UnauthorizedError          401
│   └── SealedError                410: the execution has ended
├── CorruptRecordError(ValueError) a frame, WAL or export fails its checks; carries the byte offset
├── StorageError                   a record could not be made durable: disk full, read-only, gone
└── GraphError                     a record that the branch graph can't take
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


class GyreError(Exception):
    """Base of all. `str(error)` is one line a user can act on."""


class ConfigError(GyreError, ValueError):
    """A setting, file or argument of the user's is wrong."""


class MissingExtraError(GyreError, ImportError):
    """An optional dependency is needed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with the extra: pip install 'gyre[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        return (type(self), (self.package, self.extra))


class TaskError(GyreError, ValueError):
    """A task folder is malformed."""


class SandboxError(GyreError):
    """A sandbox could not be started, used or stopped."""


class HarnessError(GyreError):
    """A harness could not be started or broke in a way that is not the policy's doing."""


class EngineError(GyreError):
    """An engine or router refused, failed or vanished."""

    status: int | None = None
    """HTTP status it refused with, when it answered."""
    retry_after: float | None = None
    """Seconds after which it wants to be asked again."""


class ContextOverflowError(EngineError):
    """The prompt, or prompt plus reply, is longer than the model's context."""

    def __init__(self, message: str, *, prompt_tokens: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class EngineGoneError(EngineError):
    """No answer from the engine: connection refused, reset, or cut in mid-stream."""


class RequestError(GyreError, ValueError):
    """A harness's request can't be served as it stands."""

    status = 400

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status
        self.code = code


class UnauthorizedError(RequestError):
    """No token, or one that names no execution."""

    status = 401


class SealedError(RequestError):
    """The execution has ended; nothing more is recorded for it."""

    status = 410


class CorruptRecordError(GyreError, ValueError):
    """A frame, WAL or export fails its checks."""

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


class StorageError(GyreError):
    """A record could not be made durable (disk full, read-only, I/O error): what needed it must fail."""


class GraphError(GyreError):
    """A record that the branch graph can't take."""


def explain_problems(model: Any, problems: Sequence[Any]) -> str:
    """One line for the problems of a pydantic ValidationError (`error.errors()`) of `model`.

    Every missing key; else the first problem, with the key that was probably meant, and how many more there are.
    """
    missing = [_where(problem) for problem in problems if problem["type"] == "missing"]
    if missing:
        return f"{', '.join(missing)}: needed, but not given"
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{_where(first)}: {_said(model, first)}{more}" if first["loc"] else f"{_said(model, first)}{more}"


def _said(model: Any, problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        known = _known(model, problem["loc"])
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        return (
            f"no such {'table' if len(problem['loc']) == 1 and isinstance(problem['input'], dict) else 'key'}; {hint}"
        )
    if problem["type"] in ("model_type", "model_attributes_type"):
        return "must be a table"
    text: str = problem["msg"]
    return text.removeprefix("Value error, ").replace("Input should be", "must be")


def _known(model: Any, loc: Sequence[Any]) -> list[str]:
    """The keys that stand where `loc` points to."""
    for part in loc[:-1]:
        field = model.model_fields.get(part)
        if field is None or not hasattr(field.annotation, "model_fields"):
            return []
        model = field.annotation
    return sorted(model.model_fields)


def _where(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"])
