"""The ledger: what was ordered, what became of it, and which step trained it. It survives kill -9 of
everything.
"""

from __future__ import annotations

from gyre_backend.ledger.store import GroupRow, Ledger, StepRow

__all__ = ["GroupRow", "Ledger", "StepRow"]
