"""What the scheduler knows, what it hears, and what it asks for. Data only; the rules are in `policy*.py`.

Words and letters (design, section 8): d, p, f = executions dispatched, started, finished; w = d - f, the
waterlevel; C_R = rollout slots now (cells in rollout plus the standalone pool); C_e = slots of one cell; B =
groups per step; S = staleness budget (version trained at - version dispatched at, never more than S).

Times are seconds on the driver's monotonic clock; `work` is training time in cell-seconds (one cell alone).
Cells are numbered from 0; cell 0 is the core.
"""

from __future__ import annotations

from enum import Enum

import msgspec

GroupId = str | int

ALWAYS = 2**62
"""`quiet_above` of a state that must be evaluated at every event."""


class Role(Enum):
    """What a cell does. The two moves are roles of their own: a moving cell serves neither side."""

    ROLLOUT = "rollout"
    TO_TRAINING = "to-training"
    TRAINING = "training"
    TO_ROLLOUT = "to-rollout"
    LOST = "lost"


class Phase(Enum):
    """Where the optimizer step is."""

    IDLE = "idle"
    """No step is open."""
    OPEN = "open"
    """Groups are assigned and trained."""
    CLOSING = "closing"
    """Every micro-step is in: gradients are collected, the optimizer steps, weights are published."""


class CellState(msgspec.Struct, frozen=True, gc=False):
    """One elastic cell."""

    role: Role
    slots: int
    """C_e: executions it serves at once when in rollout."""
    since: float = 0.0
    """When it took this role, s."""


class Group(msgspec.Struct, frozen=True, gc=False):
    """A group whose executions have all ended and been scored."""

    id: GroupId
    version: int
    """Policy version at its dispatch: the oldest version any of its tokens can carry."""
    work: float
    """Estimated training time, cell-seconds."""


class SchedulerState(msgspec.Struct, frozen=True, gc=False):
    """Everything `decide` remembers. Make one with `initial`."""

    cells: tuple[CellState, ...]
    standalone: int = 0
    """Slots of the standalone rollout pool, which never trains."""
    capacity: int = 0
    """C_R: standalone + slots of the cells in rollout."""
    num_training: int = 0
    """Cells in training."""
    num_moving: int = 0
    """Cells between roles."""
    mover: int = 0
    """The next cell in order that may go to training: the first in rollout, behind a training core; -1 if
    none."""
    last_training: int = -1
    """The last cell in order that trains; -1 if none."""
    now: float = 0.0
    version: int = 0
    """Policy version of the published weights; step `version` trains it to `version + 1`."""
    dispatched: int = 0
    """d, executions."""
    started: int = 0
    """p, executions."""
    finished: int = 0
    """f, executions."""
    inflight: tuple[tuple[int, int], ...] = ()
    """Groups that aren't ready yet: (dispatch version, groups), ascending."""
    sent_at: tuple[tuple[int, float], ...] = ()
    """When each version in flight was first dispatched, s."""
    span: float = 0.0
    """Time from a version's dispatch until its last group is ready (moving average), s; 0 = unknown."""
    num_inflight: int = 0
    """Sum of `inflight`, groups."""
    ready: tuple[Group, ...] = ()
    """Ready and in no step, oldest version first, then in order of arrival."""
    ready_work: float = 0.0
    """Sum of `work` over `ready`, cell-seconds."""
    fits: int = 0
    """Ready groups that the next step (or the open one's free places) may take now."""
    phase: Phase = Phase.IDLE
    members: tuple[Group, ...] = ()
    """Groups of the open step."""
    trained: frozenset[GroupId] = frozenset()
    """Members whose micro-steps are all in."""
    queued_micro_steps: int = 0
    """Micro-steps of the open step that nobody has leased."""
    queued_work: float = 0.0
    """Their training time, cell-seconds."""
    burst_left: int = 1
    """Optimizer steps left in the burst, the open one included."""
    refill: bool = True
    """A dispatch is due (the start of a burst)."""
    releasing: bool = False
    """The burst is over and its training prefix is being given back."""
    ready_since: float | None = None
    """Since when enough groups have been ready for the core to move."""
    starved_since: float | None = None
    """Since when the training cells have had nothing to lease and nothing ready to assign."""
    wake_at: float | None = None
    """The earliest pending `WakeAt`."""
    move_seconds: tuple[float, float] = (0.0, 0.0)
    """Last measured duration of a move to training and of a move to rollout; 0 = never measured."""
    group_wait: float = 0.0
    """Mean time between two groups becoming ready (moving average), s; 0 = unknown."""
    last_ready: float | None = None
    quiet_above: int = ALWAYS
    """While w is above this, an execution that starts or ends changes no decision (found by the last full
    evaluation)."""
    ignored: int = 0
    """Events that were impossible in the state they arrived in (duplicates, news of lost cells) and changed
    nothing."""

    @property
    def waterlevel(self) -> int:
        """w = d - f: unfinished executions."""
        return self.dispatched - self.finished

    @property
    def outstanding(self) -> int:
        """Groups dispatched and not yet part of published weights."""
        return self.num_inflight + len(self.ready) + len(self.members)

    def count(self, role: Role) -> int:
        """Cells in `role`."""
        return sum(cell.role is role for cell in self.cells)


def initial(
    num_cells: int,
    slots: int,
    *,
    standalone: int = 0,
    version: int = 0,
    ready: tuple[Group, ...] = (),
    now: float = 0.0,
) -> SchedulerState:
    """Fresh state: every cell in rollout, nothing dispatched.

    Args:
        num_cells: K, at least 1.
        slots: C_e of each cell, at least 1.
        standalone: slots of the standalone rollout pool.
        version: policy version of the weights, from the checkpoint after a restart.
        ready: groups that the ledger holds as ready and untrained (restart); oldest version first.
    """
    if num_cells < 1 or slots < 1 or standalone < 0:
        raise ValueError(f"need >= 1 cell of >= 1 slot: got {num_cells} cells, {slots} slots, {standalone} standalone")
    return SchedulerState(
        cells=tuple(CellState(Role.ROLLOUT, slots, now) for _ in range(num_cells)),
        standalone=standalone,
        capacity=standalone + num_cells * slots,
        now=now,
        version=version,
        ready=tuple(sorted(ready, key=lambda g: g.version)),
        ready_work=sum(g.work for g in ready),
    )


# ---------------------------------------------------------------------------------------------------- events


class _Event(msgspec.Struct, frozen=True, gc=False):
    now: float
    """Driver's clock, s. An event older than the state counts as happening now."""


class Tick(_Event, frozen=True, gc=False):
    """Time has passed. Send the first to start, then one whenever a `WakeAt` falls due."""


class ExecutionStarted(_Event, frozen=True, gc=False):
    """`count` executions were opened (p)."""

    count: int = 1


class ExecutionFinished(_Event, frozen=True, gc=False):
    """`count` executions were sealed, whatever their outcome (f)."""

    count: int = 1


class GroupReady(_Event, frozen=True, gc=False):
    """All executions of a group are sealed and scored, and it has something to train."""

    group: GroupId
    version: int
    """The `version` of the `Dispatch` that sent it."""
    work: float
    """Estimated training time, cell-seconds."""


class GroupDropped(_Event, frozen=True, gc=False):
    """A group ended with nothing to train (all invalid, say). Another is dispatched in its place."""

    version: int


class QueueLevel(_Event, frozen=True, gc=False):
    """Level of the micro-step queue: what is queued and not leased, for the open step."""

    micro_steps: int
    work: float
    """cell-seconds"""


class GroupTrained(_Event, frozen=True, gc=False):
    """Every micro-step of a member group is in some live cell's gradient."""

    group: GroupId


class GroupRequeued(_Event, frozen=True, gc=False):
    """A cell died with (part of) the group's gradient: the group isn't trained after all. Takes a closing
    step back to open."""

    group: GroupId


class MoveDone(_Event, frozen=True, gc=False):
    """The cell has arrived in the role it was moving to."""

    cell: int


class Published(_Event, frozen=True, gc=False):
    """The optimizer has stepped and the rollout cells serve `version`."""

    version: int


class CellLost(_Event, frozen=True, gc=False):
    """The cell died or hangs. Losing the core aborts the open step: its groups become ready again."""

    cell: int


class CellBack(_Event, frozen=True, gc=False):
    """A lost cell serves rollouts again, with the current weights."""

    cell: int


Event = (
    Tick
    | ExecutionStarted
    | ExecutionFinished
    | GroupReady
    | GroupDropped
    | QueueLevel
    | GroupTrained
    | GroupRequeued
    | MoveDone
    | Published
    | CellLost
    | CellBack
)

# --------------------------------------------------------------------------------------------------- actions


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send `groups` new groups to the harnesses. They count as dispatched (d) from now on."""

    groups: int
    version: int
    """Remember it: the group's `GroupReady` or `GroupDropped` must name it."""


class MoveToTraining(msgspec.Struct, frozen=True, gc=False):
    """Take the cell out of rollout: stop routing, reserve, abort, resend, release, load. Answer `MoveDone` or
    `CellLost`."""

    cell: int


class MoveToRollout(msgspec.Struct, frozen=True, gc=False):
    """Bring the cell back. If a step is open, the core first collects the cell's gradient. Answer `MoveDone`
    or `CellLost`."""

    cell: int


class BeginStep(msgspec.Struct, frozen=True, gc=False):
    """Open a step that trains `version`: freeze the weights, zero the gradients, take a snapshot for
    satellites."""

    version: int


class Assign(msgspec.Struct, frozen=True, gc=False):
    """These groups belong to the open step: plan their micro-steps and queue them."""

    version: int
    groups: tuple[GroupId, ...]


class EndStep(msgspec.Struct, frozen=True, gc=False):
    """All groups are trained: collect the gradients in cell order, step, publish. Answer `Published(version +
    1)`."""

    version: int


class AbortStep(msgspec.Struct, frozen=True, gc=False):
    """The core is gone: forget the open step's gradients and leases. `groups` will be assigned again."""

    version: int
    groups: tuple[GroupId, ...]


class WakeAt(msgspec.Struct, frozen=True, gc=False):
    """Send a `Tick` no later than `time`."""

    time: float


Action = Dispatch | MoveToTraining | MoveToRollout | BeginStep | Assign | EndStep | AbortStep | WakeAt
