"""The lease book: whatever happens to cells, every micro-step counts exactly once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_backend.cells.lease import Lease, LeaseBook, in_cell_order
from gyre_backend.errors import CellError

CELLS = ["cell0", "cell1", "cell2"]


class Leases(RuleBasedStateMachine):
    """Cells claim, compute, hand over, die, come back and send stale news; the model is a plain gradient
    count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(7)
        self.epochs: dict[str, int] = {}
        self.held: dict[str, list[Lease]] = {cell: [] for cell in CELLS}
        self.buffers: dict[str, list[int]] = {cell: [] for cell in CELLS}
        self.core: list[int] = []
        self.stale: list[Lease] = []
        self.added = 0

    @precondition(lambda self: not self.book.closed and self.added < 12)
    @rule()
    def add(self) -> None:
        self.book.add(self.added)
        self.added += 1

    @rule(cell=st.sampled_from(CELLS))
    def join(self, cell: str) -> None:
        if cell not in self.epochs:
            self.epochs[cell] = self.book.join(cell)

    @rule(cell=st.sampled_from(CELLS))
    def claim(self, cell: str) -> None:
        lease = self.book.claim(cell, self.epochs.get(cell, -1))
        if lease is not None:
            assert cell in self.epochs
            self.held[cell].append(lease)

    @rule(cell=st.sampled_from(CELLS))
    def finish(self, cell: str) -> None:
        if self.held[cell]:
            lease = self.held[cell].pop(0)
            assert self.book.finish(lease)
            self.buffers[cell].append(lease.micro)
            assert not self.book.finish(lease), "the same result counts once"

    @rule(cell=st.sampled_from(CELLS))
    def hand_over(self, cell: str) -> None:
        assert sorted(self.book.uncollected_by(cell)) == sorted(self.buffers[cell])
        assert sorted(self.book.collect(cell)) == sorted(self.buffers[cell])
        self.core += self.buffers[cell]
        self.buffers[cell] = []

    @rule(cell=st.sampled_from(CELLS))
    def die(self, cell: str) -> None:
        lost = sorted(self.buffers[cell] + [lease.micro for lease in self.held[cell]])
        assert sorted(self.book.drop(cell)) == lost
        self.stale += self.held[cell]
        self.held[cell], self.buffers[cell] = [], []
        self.epochs.pop(cell, None)

    @rule()
    def late_news(self) -> None:
        for lease in self.stale:
            assert not self.book.finish(lease), "a lost lease's result must not count"

    @rule()
    def close(self) -> None:
        self.book.close()

    @invariant()
    def counted_once(self) -> None:
        everywhere = self.core + [m for cell in CELLS for m in self.buffers[cell]]
        assert len(everywhere) == len(set(everywhere))
        assert self.book.done_numbers() == set(everywhere)
        leased = {lease.micro for cell in CELLS for lease in self.held[cell]}
        assert set(self.book.open_numbers()) == set(range(self.added)) - set(everywhere) - leased
        assert self.book.complete == (self.book.closed and sorted(self.core) == list(range(self.added)))


TestLeases = Leases.TestCase


def test_numbers_are_unique_and_closing_is_final() -> None:
    book = LeaseBook(0)
    book.add(0)
    with pytest.raises(CellError):
        book.add(0)
    book.close()
    with pytest.raises(CellError):
        book.add(1)


def test_lowest_open_number_first_and_again_after_a_loss() -> None:
    book = LeaseBook(0)
    for number in (2, 0, 1):
        book.add(number)
    epoch = book.join("cell1")
    first, second = book.claim("cell1", epoch), book.claim("cell1", epoch)
    assert first is not None
    assert second is not None
    assert (first.micro, second.micro) == (0, 1)
    assert book.drop("cell1") == [0, 1]
    assert book.claim("cell1", epoch) is None, "its epoch is over"
    again = book.claim("cell1", book.join("cell1"))
    assert again is not None
    assert again.micro == 0
    assert book.lost == 2


def test_fixed_order_of_cells() -> None:
    assert in_cell_order({"b", "x", "a"}, ["b", "a"]) == ["b", "a", "x"]
