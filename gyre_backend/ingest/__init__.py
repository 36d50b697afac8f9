"""Takes the stream of frames: keeps them on disk, folds them into branch graphs, tells when an execution is
sealed.
"""

from gyre_backend.ingest.ingest import Ingest, IngestStats
from gyre_backend.ingest.routes import ingest_routes

__all__ = ["Ingest", "IngestStats", "ingest_routes"]
