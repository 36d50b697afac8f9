"""Formats by name, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import ConfigError, MissingExtraError
from gyre_sdk.exporters import atif, parquet, samples, structure
from gyre_sdk.graph import BranchGraph

Writer = Callable[[Iterable[BranchGraph], Path], list[Path]]


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write executions into a folder."""

    name: str
    about: str
    write: Writer


def _per_execution(suffix: str, render: Callable[[BranchGraph], str]) -> Writer:
    def write(graphs: Iterable[BranchGraph], folder: Path) -> list[Path]:
        paths = []
        for graph in graphs:
            path = folder / f"{safe_name(graph.execution)}{suffix}"
            path.write_text(render(graph), encoding="utf-8")
            paths.append(path)
        return paths

    return write


def _write_atif(graphs: Iterable[BranchGraph], folder: Path) -> list[Path]:
    paths = []
    for graph in graphs:
        for document in atif.to_atif(graph):
            path = folder / safe_name(atif.file_name(document))
            path.write_bytes(atif.to_json(document))
            paths.append(path)
    return paths


def _write_samples(graphs: Iterable[BranchGraph], folder: Path) -> list[Path]:
    path = folder / "samples.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(samples.to_lines(graphs))
    return [path]


def _write_otel(graphs: Iterable[BranchGraph], folder: Path) -> list[Path]:
    try:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter
    except ImportError as error:
        raise MissingExtraError("opentelemetry-sdk", "otel") from error
    from gyre_sdk.exporters.otel import export_spans

    path = folder / "spans.jsonl"
    with path.open("w", encoding="utf-8") as file:
        export_spans(graphs, ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n"))
    return [path]


FORMATS: dict[str, Format] = {
    made.name: made
    for made in (
        Format("graphml", "GraphML; loads back to an equal graph", _per_execution(".graphml", structure.to_graphml)),
        Format(
            "node-link", "node-link JSON; loads back to an equal graph", _per_execution(".json", structure.to_node_link)
        ),
        Format("cytoscape", "Cytoscape JSON", _per_execution(".cyjs", structure.to_cytoscape)),
        Format("dot", "Graphviz DOT", _per_execution(".dot", structure.to_dot)),
        Format("atif", "ATIF 1.8: one document per branch of the main agent", _write_atif),
        Format("parquet", "Parquet tables: nodes, calls, branches", parquet.write_parquet),
        Format("samples", "SFT/RL samples as JSON lines", _write_samples),
        Format("otel", "OpenTelemetry GenAI spans as JSON lines", _write_otel),
    )
}


def export(name: str, graphs: Iterable[BranchGraph], folder: Path) -> list[Path]:
    """Write executions as `FORMATS[name]` into `folder` (made if missing); returns the files.

    `graphs` may be a generator: they are taken one at a time. Make them with `keep_bodies=True` for texts in
    `atif` and `samples`. Raises ConfigError for an unknown format or a folder that can't be written,
    MissingExtraError.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; there are {', '.join(FORMATS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FORMATS[name].write(graphs, folder)
    except OSError as error:
        raise ConfigError(f"can't export to {folder}: {error.strerror or error}") from error


def safe_name(name: str) -> str:
    """A file name from an id that came from outside."""
    kept = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    return kept.lstrip(".") or "unnamed"
