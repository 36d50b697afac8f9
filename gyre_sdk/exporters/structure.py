"""The graph itself: GraphML, node-link JSON, Cytoscape JSON, DOT.

GraphML and node-link load back to a graph equal to `BranchGraph.to_networkx()`, arrays and all: token ids as
decimal numbers, logprobs as the shortest decimals that give the same float32, version spans as
`version:start-end`.
"""

from __future__ import annotations

import io
import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_sdk.errors import CorruptRecordError
from gyre_sdk.graph import BranchGraph

if TYPE_CHECKING:
    import networkx as nx

_ARRAYS = {"token_ids": np.int32, "logprobs": np.float32}
_NO_XML = re.compile("[\\\\\\x00-\\x08\\x0b-\\x1f\\ud800-\\udfff\\ufffe\\uffff]")
"""What XML has no character for, the carriage return that it makes a line feed of, and the backslash that marks them."""
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})")


def to_graphml(graph: BranchGraph) -> str:
    """GraphML text. Arrays are strings; characters that XML lacks, and backslashes, are `\\uXXXX`; see `from_graphml`."""
    import networkx as nx

    buffer = io.BytesIO()
    nx.write_graphml(_plain(graph.to_networkx(), "text"), buffer, prettyprint=False)
    return buffer.getvalue().decode()


def from_graphml(text: str) -> nx.DiGraph:
    """The graph that `to_graphml` wrote. Raises CorruptRecordError for anything else."""
    import networkx as nx

    try:
        graph = nx.parse_graphml(text)
        for attributes in _attributes(graph):
            for key, value in attributes.items():
                if isinstance(value, str):
                    attributes[key] = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), value)
        return _rich(graph)
    except (nx.NetworkXError, ValueError, KeyError, SyntaxError) as error:
        raise CorruptRecordError(f"not a GraphML file of ours: {error}") from error


def to_node_link(graph: BranchGraph) -> str:
    """Node-link JSON, as networkx and d3 read it."""
    import networkx as nx

    return json.dumps(nx.node_link_data(_plain(graph.to_networkx(), "list"), edges="edges"), allow_nan=False)


def from_node_link(text: str) -> nx.DiGraph:
    """The graph that `to_node_link` wrote. Raises CorruptRecordError for anything else."""
    import networkx as nx

    try:
        return _rich(nx.node_link_graph(json.loads(text), edges="edges"))
    except (nx.NetworkXError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRecordError(f"not a node-link file of ours: {error}") from error


def to_cytoscape(graph: BranchGraph, *, tokens: bool = True) -> str:
    """Cytoscape's JSON: `{"data": ..., "elements": {"nodes": ..., "edges": ...}}`; without token arrays when
    `tokens` is off.
    """
    import networkx as nx

    plain = _plain(graph.to_networkx(), "list")
    for _, attributes in plain.nodes(data=True):
        if not tokens:
            for key in (*_ARRAYS, "versions"):
                attributes.pop(key, None)
    return json.dumps(nx.cytoscape_data(plain), allow_nan=False)


def to_dot(graph: BranchGraph) -> str:
    """Graphviz DOT: a box per node, a line style per edge kind."""
    lines = ["digraph {", '  rankdir=LR; node [shape=box, fontname="sans-serif", style=filled];']
    whole = graph.to_networkx()
    for identity, facts in whole.nodes(data=True):
        what = f"call {facts['call']}" if facts["call"] >= 0 else "given"
        label = f"{what}\\n{facts['length']} tokens\\n{facts['role']}"
        colour = "#d9ead3" if facts["call"] >= 0 else "#eeeeee"
        lines.append(f'  "{identity}" [label="{label}", fillcolor="{colour}"];')
    for source, target, facts in whole.edges(data=True):
        lines.append(f'  "{source}" -> "{target}" [{_dot_edge(facts)}];')
        for also in facts.get("also", ()):
            lines.append(f'  "{source}" -> "{target}" [{_dot_edge(also)}];')
    return "\n".join([*lines, "}", ""])


_DOT_STYLES = {
    "continues": "",
    "retries": ', style=dashed, color="#b45f06"',
    "forks": ', style=bold, color="#0b5394"',
    "returns": ', style=dotted, color="#0b5394"',
    "compacts": ', style=bold, color="#38761d"',
    "rerenders": ', style=dashed, color="#990000"',
}


def _dot_edge(facts: dict[str, Any]) -> str:
    kind = facts["kind"]
    if kind == "continues":
        return 'class="continues"'
    text = kind + (f": {facts['reason']}" if facts["reason"] else "")
    return f"label={json.dumps(text)}, constraint=false{_DOT_STYLES[kind]}"


def equal_graphs(one: nx.DiGraph, other: nx.DiGraph) -> bool:
    """Same nodes, edges and attributes; arrays by value and type."""
    return (
        _same(dict(one.graph), dict(other.graph))
        and _same(dict(one.nodes(data=True)), dict(other.nodes(data=True)))
        and _same({(a, b): f for a, b, f in one.edges(data=True)}, {(a, b): f for a, b, f in other.edges(data=True)})
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _plain(graph: nx.DiGraph, arrays: str) -> nx.DiGraph:
    """Attributes as strings and numbers; arrays as `text` or as a `list`."""
    for attributes in _attributes(graph):
        for key, value in attributes.items():
            if isinstance(value, np.ndarray):
                attributes[key] = _array_text(value) if arrays == "text" else _array_list(value)
            elif key == "versions":
                attributes[key] = " ".join(f"{version}:{start}-{end}" for version, start, end in value)
            elif key == "also":
                attributes[key] = json.dumps(value)
            if isinstance(attributes[key], str) and arrays == "text":
                value = attributes[key]
                attributes[key] = _NO_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return graph


def _attributes(graph: nx.DiGraph) -> list[dict[str, Any]]:
    return [
        graph.graph,
        *(facts for _, facts in graph.nodes(data=True)),
        *(facts for *_, facts in graph.edges(data=True)),
    ]


def _array_text(values: np.ndarray[Any, Any]) -> str:
    """Decimals with a blank between: the shortest that give the same values back."""
    if values.dtype == np.float32:
        return " ".join(np.format_float_positional(value, unique=True) for value in values)
    return " ".join(map(str, values.tolist()))


def _array_list(values: np.ndarray[Any, Any]) -> list[int | float | str]:
    """Numbers; what JSON has no number for is a string."""
    return [item if math.isfinite(item) else str(item) for item in values.tolist()]


def _rich(graph: nx.DiGraph) -> nx.DiGraph:
    """Arrays, spans and tuples again."""
    graph.graph.pop("node_default", None)
    graph.graph.pop("edge_default", None)
    for _, facts in graph.nodes(data=True):
        for key, dtype in _ARRAYS.items():
            if key in facts:
                value = facts[key]
                facts[key] = np.array(value.split() if isinstance(value, str) else value, dtype)
        if "versions" in facts:
            facts["versions"] = tuple(_span(word) for word in facts["versions"].split())
    for *_, facts in graph.edges(data=True):
        if "also" in facts:
            facts["also"] = tuple(json.loads(facts["also"]))
    return graph


def _span(word: str) -> tuple[int, int, int]:
    version, _, span = word.partition(":")
    start, _, end = span.partition("-")
    return int(version), int(start), int(end)
