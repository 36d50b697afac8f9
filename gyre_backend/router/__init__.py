"""One `/generate` front for all engines: placement, moves without a seam, back-pressure."""

from gyre_backend.router.migrate import KVMigrator, PrefillMigrator, make_migrator
from gyre_backend.router.router import Router, RouterConfig

__all__ = ["KVMigrator", "PrefillMigrator", "Router", "RouterConfig", "make_migrator"]
