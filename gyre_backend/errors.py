"""Every exception that Gyre's backend raises on purpose. All derive from `gyre_sdk.errors.GyreError`.

GyreError
├── TrainingError              a training step can't be done
│   ├── UnsupportedError       a model or setting that can't be trained exactly; names the setting
│   └── PlanError(ValueError)  a tree plan that breaks its own rules
├── WeightsError               a snapshot could not be taken, moved or verified
├── CellError                  a cell could not be started, or died, or answers wrong
├── LedgerError                the ledger refuses a transition
├── IngestError                frames that can't be taken: of a strange execution, out of order, or not
fitting └── SchedulerError             the policy was handed an impossible event
"""

from __future__ import annotations

from gyre_sdk.errors import GyreError


class TrainingError(GyreError):
    """A training step can't be done."""


class UnsupportedError(TrainingError):
    """A model or setting that can't be trained exactly. The message names the setting."""


class PlanError(TrainingError, ValueError):
    """A tree plan that breaks its own rules."""


class WeightsError(GyreError):
    """A snapshot could not be taken, moved or verified."""


class CellError(GyreError):
    """A cell could not be started, or died, or answers wrong."""


class LedgerError(GyreError):
    """The ledger refuses a transition."""


class IngestError(GyreError):
    """Frames that can't be taken; nothing of what came with them was kept. `status` is HTTP's."""

    def __init__(self, message: str, *, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


class SchedulerError(GyreError):
    """The policy was handed an impossible event."""
