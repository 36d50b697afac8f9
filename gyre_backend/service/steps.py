"""One optimizer step: its micro-steps, who computes them, and how their gradients come together in the
core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gyre_backend.cells.client import CellRefused
from gyre_backend.cells.lease import Lease, LeaseBook
from gyre_backend.errors import CellError, TrainingError
from gyre_backend.service.fleet import Cell, Fleet
from gyre_backend.service.groups import PreparedGroup
from gyre_backend.trainers.base import MicroStepResult
from gyre_backend.weights import Manifest

log = logging.getLogger(__name__)

MAX_REFUSALS = 3


@dataclass(frozen=True, slots=True)
class _Micro:
    group: str
    plan: bytes
    tokens: int


class OpenStep:
    """The open step. `notify()` is called whenever the queue or the set of trained groups may have
    changed.
    """

    def __init__(self, step: int, fleet: Fleet, notify: Callable[[], None]) -> None:
        self.step = step
        self.book = LeaseBook(step)
        self.groups: dict[str, PreparedGroup] = {}
        self.results: dict[int, MicroStepResult] = {}
        self.leases: dict[int, Lease] = {}
        self.snapshot: Manifest | None = None
        self.opened = time.monotonic()
        self.gradient_bytes = 0
        self.busy_s: dict[str, float] = {}
        self._fleet = fleet
        self._notify = notify
        self._micros: dict[int, _Micro] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._epochs: dict[str, int] = {}
        self._published_as: dict[str, int] = {}
        self._collecting = asyncio.Lock()
        self._refusals: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._joining: dict[str, asyncio.Lock] = {}
        self._core_began = False
        self._closed = False
        self.failure: TrainingError | None = None

    # -- the queue

    def assign(self, groups: Iterable[PreparedGroup]) -> None:
        """Queue the groups' micro-steps. Their numbers, and so the order of an exact sum, follow the order of
        the groups.
        """
        for group in groups:
            self.groups[group.group] = group
            for plan, tokens in zip(group.micros, group.micro_tokens, strict=True):
                number = len(self._micros)
                self._micros[number] = _Micro(group.group, plan, tokens)
                self.book.add(number)
        self._wake()

    def queued(self) -> tuple[int, int]:
        """(micro-steps nobody has, their unique tokens)."""
        open_numbers = self.book.open_numbers()
        return len(open_numbers), sum(self._micros[number].tokens for number in open_numbers)

    def trained(self) -> set[str]:
        """Groups whose micro-steps are all in some cell's gradient."""
        done = self.book.done_numbers()
        missing = {micro.group for number, micro in self._micros.items() if number not in done}
        return set(self.groups) - missing

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._notify()

    # -- members

    async def join(self, cell: Cell) -> None:
        """Bring a training cell to the step's weights and let it claim micro-steps. Raises CellError: it then
        takes no part.
        """
        async with self._joining.setdefault(cell.name, asyncio.Lock()):
            if cell.name not in self._loops and not self._closed:
                await self._join(cell)

    async def _join(self, cell: Cell) -> None:
        client = cell.ask()
        if cell.version != self.step:
            if self.snapshot is None:
                raise CellError(
                    f"cell {cell.name} holds version {cell.version}, and there is no snapshot of {self.step}"
                )
            report = await client.pull(self.snapshot)
            cell.version = report.version
            log.info(
                "%s holds version %d: %s pull of %d bytes in %.3f s",
                cell.name,
                report.version,
                report.mode,
                report.bytes_read,
                report.seconds,
            )
        epoch = self.book.join(cell.name)
        await client.begin(self.step, epoch, keep=cell is self._fleet.core and self._core_began)
        self._core_began = self._core_began or cell is self._fleet.core
        if self._closed:
            return
        self._epochs[cell.name] = self._published_as[cell.name] = epoch
        self._loops[cell.name] = asyncio.create_task(self._work(cell, epoch), name=f"micro-{cell.name}")

    async def _work(self, cell: Cell, epoch: int) -> None:
        """Claim, compute, report, until the cell is dropped or leaves."""
        while self._epochs.get(cell.name) == epoch:
            changed = self._changed
            lease = self.book.claim(cell.name, epoch)
            if lease is None:
                await changed.wait()
                continue
            self._notify()
            try:
                result = await cell.ask().micro(lease.micro, epoch, self._micros[lease.micro].plan)
            except CellRefused as error:
                self._refused(lease, error)
                return
            except CellError as error:
                self._fleet.fail(cell.index, str(error))
                return
            if self.book.finish(lease):
                self.results[lease.micro] = result
                self.leases[lease.micro] = lease
                cell.busy_s += result.seconds
                self.busy_s[cell.name] = self.busy_s.get(cell.name, 0.0) + result.seconds
            self._wake()

    def _refused(self, lease: Lease, error: CellRefused) -> None:
        """The cell is alive and could not do it: a plan that can't be trained fails everywhere, so it is not
        tried for ever.
        """
        count = self._refusals[lease.micro] = self._refusals.get(lease.micro, 0) + 1
        log.warning("%s refused micro-step %d: %s", lease.cell, lease.micro, error)
        if count >= MAX_REFUSALS:
            self.failure = TrainingError(f"micro-step {lease.micro} of step {self.step} can't be done: {error}")
        cell = next(c for c in self._fleet.cells if c.name == lease.cell)
        self._fleet.fail(cell.index, f"refused a micro-step: {error}")

    def drop(self, cell: Cell) -> None:
        """The cell is gone, or wrong: what it has not handed over is open again."""
        self._stop_loop(cell)
        self._forget(self.book.drop(cell.name))
        self._wake()

    def _stop_loop(self, cell: Cell) -> None:
        self._epochs.pop(cell.name, None)
        loop = self._loops.pop(cell.name, None)
        if loop is not None and loop is not asyncio.current_task():
            loop.cancel()

    async def leave(self, cell: Cell) -> None:
        """The cell goes back to rollout in mid-step: it finishes what it computes, the core takes its
        gradient over.

        Raises CellError when that fails; the caller drops the cell.
        """
        epoch = self._epochs.pop(cell.name, None)
        loop = self._loops.pop(cell.name, None)
        if epoch is None:
            return
        if loop is not None:
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.wait({loop})
        self.book.leave(cell.name, epoch)
        await self.collect(cell)

    async def collect(self, cell: Cell) -> None:
        """Have the core pull, verify and add the cell's gradient. Raises CellError (the core's failure or the
        cell's); what it did not add is open again.
        """
        async with self._collecting:  # a cell may be leaving just when the step ends
            if cell is self._fleet.core:
                self.book.collect(cell.name)
                return
            # The cell may be lost, and even replaced, while the core is adding: these micro-steps wait for the core's answer.
            micros = self.book.begin_collect(cell.name)
            taken = False
            try:
                if micros:
                    manifest = await cell.ask().gradients(self._published_as[cell.name], micros)
                    self.gradient_bytes += await self._add(manifest, micros)
                taken = True
            finally:
                opened = self.book.end_collect(micros, taken=taken)
                self._forget(opened)

    async def _add(self, manifest: Manifest, micros: list[int]) -> int:
        core = self._fleet.core
        try:
            return await core.ask().add(manifest, micros)
        except CellRefused:
            raise
        except CellError as error:
            # It may have added them or not: nobody knows what its gradient holds.
            self._fleet.fail(core.index, f"no answer to whether a gradient was added: {error}")
            raise

    def _forget(self, opened: Iterable[int]) -> None:
        """These micro-steps were done, and are open again."""
        numbers = list(opened)
        for number in numbers:
            self.results.pop(number, None)
            self.leases.pop(number, None)
        if numbers:
            self._wake()

    async def collect_all(self) -> list[tuple[Cell, CellError]]:
        """Gradients of all contributors, core first, in cell order. Returns the cells whose gradient could
        not be had.

        A satellite's part ends with that: what it holds is frozen. If micro-steps come open again (another cell was lost
        meanwhile), it takes part in them once it has joined anew.
        """
        failed = []
        contributors = set(self.book.contributors())
        for cell in self._fleet.cells:
            if cell.name not in contributors:
                continue
            try:
                await (self.collect(cell) if cell is self._fleet.core else self.leave(cell))
            except CellError as error:
                if not self._fleet.core.up:
                    raise
                failed.append((cell, error))
        while self.book.collecting:  # one that was leaving by itself
            async with self._collecting:
                pass
            await asyncio.sleep(0)
        return failed

    def all_collected(self) -> bool:
        """Every micro-step of every assigned group is in the core's gradient."""
        return bool(self._micros) and self.book.all_collected

    def close(self) -> None:
        """No loop of this step goes on, and none begins."""
        self._closed = True
        for cell in self._fleet.cells:
            self._stop_loop(cell)
