"""Writes docs/configuration.md from the classes that read the TOML file, so that it can't say anything else.

python scripts/config_reference.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pydantic

from gyre_backend.config import BackendConfig
from gyre_sdk.harness.config import RunConfig, SamplingConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """# The TOML file

`gyre train FILE` reads one file. `[run]` and `[sampling]` are the runner's, the other tables the backend's (`gyre serve FILE` reads those).
A key that is unknown or of a wrong type is an error that names it. Relative paths in `[run]` start at the file's folder. A short
example that runs as it stands is `examples/demo.toml`. `train.group_size` and `train.temperature` follow `run.group_size` and
`sampling.temperature`; giving both, differently, is an error.

This page is written by `python scripts/config_reference.py`.
"""


def docstrings(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Field -> the string that stands below it."""
    (body,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def type_name(annotation: Any) -> str:
    """A type as users of TOML call it."""
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value!r}`".replace("'", '"') for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {type_name(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "table"
    named = [get_args(a)[0] if get_origin(a) is Literal else a for a in get_args(annotation) if a is not type(None)]
    if named and type(None) in get_args(annotation):
        return type_name(named[0])
    names = {str: "text", int: "whole number", float: "number", bool: "true \\| false"}
    return names.get(annotation, typing.cast(str, getattr(annotation, "__name__", str(annotation))))


def bounds(field: Any) -> str:
    """`>= 1, <= 2` of a field's constraints."""
    signs = {
        annotated_types.Ge: "≥ {ge}",
        annotated_types.Gt: "> {gt}",
        annotated_types.Le: "≤ {le}",
        annotated_types.Lt: "< {lt}",
    }
    told = [signs[type(mark)].format(**vars_of(mark)) for mark in field.metadata if type(mark) in signs]
    return f" ({', '.join(told)})" if told else ""


def vars_of(mark: Any) -> dict[str, Any]:
    """The bound of a constraint, by its name."""
    return {name: getattr(mark, name) for name in ("ge", "gt", "le", "lt") if hasattr(mark, name)}


def default_of(field: Any) -> str:
    """A default as TOML writes it."""
    if field.is_required():
        return "needed"
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, (tuple, list)):
        return "`[" + ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in value) + "]`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{k} = {v}" for k, v in value.items()) + "}`"
    return f"`{value}`"


def table(name: str, model: type[pydantic.BaseModel]) -> str:
    """One table of the file as one table of the page."""
    texts = docstrings(model)
    lines = [f"## [{name}]", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        text = texts.get(key, "").replace("|", "\\|")
        lines.append(f"| `{key}` | {type_name(field.annotation)}{bounds(field)} | {default_of(field)} | {text} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    tables: dict[str, Any] = {"run": RunConfig, "sampling": SamplingConfig}
    tables |= {name: field.annotation for name, field in BackendConfig.model_fields.items()}
    return "\n".join([HEAD, *(table(name, model) for name, model in tables.items())])


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    if parser.parse_args().check:
        return 0 if PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
