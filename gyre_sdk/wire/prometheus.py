"""Prometheus' text format 0.0.4, as every server of ours answers `GET /metrics`.

Source: "Exposition formats" of the Prometheus documentation: names `[a-zA-Z_:][a-zA-Z0-9_:]*`, in a label's value `\\`,
`"` and line feeds are escaped, in a help text `\\` and line feeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "gyre_"

_BAD = re.compile(r"[^a-zA-Z0-9_:]")
_BAD_LABEL = re.compile(r"[^a-zA-Z0-9_]")


class Family(NamedTuple):
    """Samples of one name. `name` without prefix; a counter's name gets `_total`. Each sample: labels and value."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    samples: list[tuple[Mapping[str, str], float]]


def families(kind: Literal["counter", "gauge"], values: Mapping[str, float], prefix: str = "") -> list[Family]:
    """A family without labels per value, in order of name."""
    return [Family(prefix + name, kind, "", [({}, value)]) for name, value in sorted(values.items())]


def to_text(found: Iterable[Family]) -> str:
    """The page. Of two families whose names become the same one, the first is kept: the format allows no second."""
    lines: list[str] = []
    seen: set[str] = set()
    for family in found:
        name = metric_name(family.name, counter=family.kind == "counter")
        if name in seen:
            continue
        seen.add(name)
        if family.about:
            lines.append(f"# HELP {name} {_escape(family.about)}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines.extend(f"{name}{_labels(labels)} {_number(value)}" for labels, value in family.samples)
    return "\n".join(lines) + "\n" if lines else ""


def metric_name(name: str, *, counter: bool = False) -> str:
    """`gyre_...` with every character that names may not have as an underscore."""
    made = PREFIX + _BAD.sub("_", name)
    return f"{made}_total" if counter and not made.endswith("_total") else made


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{_label_name(name)}="{_escape_value(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _label_name(name: str) -> str:
    made = _BAD_LABEL.sub("_", name)
    return made if made and not made[0].isdigit() else f"_{made}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_value(text: str) -> str:
    # A lone surrogate, from a name that was no UTF-8, could not be sent.
    return _escape(text.encode("utf-8", "replace").decode()).replace('"', r"\"")


def _number(value: float) -> str:
    value = float(value)
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
