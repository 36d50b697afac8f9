"""Branch graphs in other people's formats. `export` writes any of `FORMATS`; each module has more of its
own.
"""

from gyre_sdk.exporters.atif_import import Imported, from_atif
from gyre_sdk.exporters.registry import FORMATS, Format, export
from gyre_sdk.exporters.samples import SampleOptions, samples
from gyre_sdk.exporters.structure import (
    equal_graphs,
    from_graphml,
    from_node_link,
    to_cytoscape,
    to_dot,
    to_graphml,
    to_node_link,
)

__all__ = [
    "FORMATS",
    "Format",
    "Imported",
    "SampleOptions",
    "equal_graphs",
    "export",
    "from_atif",
    "from_graphml",
    "from_node_link",
    "samples",
    "to_cytoscape",
    "to_dot",
    "to_graphml",
    "to_node_link",
]
