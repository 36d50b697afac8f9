"""Micro-step leases of one optimizer step: every micro-step counts exactly once, whoever computed it.

A micro-step is *open* (nobody has it), *leased* (a cell computes it) or *done* (its gradient lies in that
cell's buffers, not yet with
the core). A cell that dies, hangs, leaves or lies loses everything that is not yet collected: its leased and
its done micro-steps become
open again, and the epoch of its leases is over, so that whatever it still sends is refused. The book is plain
data and no I/O: the
service drives it, tests explore it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gyre_backend.errors import CellError


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of `cell` to compute micro-step `micro` of `step`, as its incarnation number `epoch`."""

    lease: int
    step: int
    micro: int
    cell: str
    epoch: int


@dataclass(slots=True)
class _Micro:
    lease: Lease | None = None
    done: bool = False
    collecting: bool = False
    """The core is about to add it: until that has an end, nobody else may compute it."""
    collected: bool = False


@dataclass(slots=True)
class LeaseBook:
    """The leases of one step. `closed` says that no more micro-steps will be added."""

    step: int
    closed: bool = False
    _micros: dict[int, _Micro] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _next: int = 0
    lost: int = 0
    """Leases that were given up because their cell was."""

    def add(self, micro: int) -> None:
        """A new micro-step. Numbers are the caller's: the order in which exact sums run."""
        if self.closed or micro in self._micros:
            raise CellError(f"micro-step {micro} of step {self.step} is known already, or the step is closed")
        self._micros[micro] = _Micro()

    def close(self) -> None:
        """All micro-steps of the step are there."""
        self.closed = True

    def join(self, cell: str) -> int:
        """`cell` takes part from now on; returns the epoch under which its leases count."""
        self._epochs[cell] = self._epochs.get(cell, 0) + 1
        return self._epochs[cell]

    def drop(self, cell: str) -> list[int]:
        """`cell` is out: its uncollected micro-steps are open again. Returns their numbers.

        Not those that the core is collecting: whether it has them shows at `end_collect`.
        """
        self._epochs[cell] = self._epochs.get(cell, 0) + 1
        returned = []
        for number, micro in self._micros.items():
            if micro.lease is not None and micro.lease.cell == cell and not (micro.collected or micro.collecting):
                micro.lease, micro.done = None, False
                returned.append(number)
        self.lost += len(returned)
        return returned

    def claim(self, cell: str, epoch: int) -> Lease | None:
        """The lowest open micro-step for `cell`; None when nothing is open (now, or for this epoch)."""
        if self._epochs.get(cell) != epoch:
            return None
        for number in sorted(self._micros):
            micro = self._micros[number]
            if micro.lease is None:
                micro.lease = Lease(self._next, self.step, number, cell, epoch)
                self._next += 1
                return micro.lease
        return None

    def finish(self, lease: Lease) -> bool:
        """The micro-step was computed. False: the lease was over already, and the result must not be
        counted.
        """
        micro = self._micros.get(lease.micro)
        if micro is None or micro.lease != lease or micro.done or self._epochs.get(lease.cell) != lease.epoch:
            return False
        micro.done = True
        return True

    def begin_collect(self, cell: str) -> list[int]:
        """The core is going to take over what `cell` has done. Returns the numbers; `end_collect` must follow."""
        numbers = self.uncollected_by(cell)
        for number in numbers:
            self._micros[number].collecting = True
        return numbers

    def end_collect(self, numbers: Iterable[int], *, taken: bool) -> list[int]:
        """The core has verified and added them, and they count for good; or it has not, and they are open again. Returns the latter."""
        opened = []
        for number in numbers:
            micro = self._micros[number]
            micro.collecting = False
            if taken:
                micro.collected = True
            else:
                micro.lease, micro.done = None, False
                opened.append(number)
        self.lost += len(opened)
        return opened

    def collect(self, cell: str) -> list[int]:
        """Both at once, for the core itself: what it has done is with it. Returns the numbers."""
        numbers = self.begin_collect(cell)
        self.end_collect(numbers, taken=True)
        return numbers

    @property
    def collecting(self) -> bool:
        """Whether the core is adding some cell's gradient right now."""
        return any(micro.collecting for micro in self._micros.values())

    def leave(self, cell: str, epoch: int) -> None:
        """The epoch is over, unless another has begun: a cell that was replaced meanwhile goes on."""
        if self._epochs.get(cell) == epoch:
            self._epochs[cell] += 1

    def contributors(self) -> list[str]:
        """Cells that hold done, uncollected micro-steps."""
        return sorted({m.lease.cell for m in self._micros.values() if _with_cell(m) and m.lease is not None})

    def uncollected_by(self, cell: str) -> list[int]:
        """Numbers of `cell`'s done micro-steps that the core does not have yet."""
        return [
            number
            for number, micro in self._micros.items()
            if _with_cell(micro) and micro.lease is not None and micro.lease.cell == cell
        ]

    def done_numbers(self) -> set[int]:
        """Micro-steps that are in some cell's gradient."""
        return {number for number, micro in self._micros.items() if micro.done}

    def open_numbers(self) -> list[int]:
        """Micro-steps that nobody has, in order."""
        return sorted(number for number, micro in self._micros.items() if micro.lease is None)

    @property
    def open(self) -> int:
        """Micro-steps that nobody has."""
        return sum(1 for micro in self._micros.values() if micro.lease is None)

    @property
    def total(self) -> int:
        """Micro-steps so far."""
        return len(self._micros)

    @property
    def computed(self) -> bool:
        """All micro-steps of a closed step are done."""
        return self.closed and all(micro.done for micro in self._micros.values())

    @property
    def complete(self) -> bool:
        """All micro-steps of a closed step are collected: the optimizer may step."""
        return self.closed and all(micro.collected for micro in self._micros.values())

    @property
    def all_collected(self) -> bool:
        """Every micro-step so far is with the core."""
        return all(micro.collected for micro in self._micros.values())

    def owners(self) -> Mapping[int, str]:
        """Micro-step -> cell whose gradient counts, for those collected."""
        return {n: m.lease.cell for n, m in self._micros.items() if m.collected and m.lease is not None}


def _with_cell(micro: _Micro) -> bool:
    return micro.done and not micro.collected and not micro.collecting


def in_cell_order(cells: Iterable[str], order: Iterable[str]) -> list[str]:
    """`cells`, sorted as in `order`: the fixed order in which gradients are added."""
    rank = {cell: number for number, cell in enumerate(order)}
    return sorted(cells, key=lambda cell: (rank.get(cell, len(rank)), cell))
