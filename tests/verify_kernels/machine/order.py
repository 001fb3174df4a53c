# SPDX-License-Identifier: Apache-2.0
"""Which accesses to shared memory are ordered, lane by lane.

Vector clocks: a lane knows of so many reads and stores of every other lane, and of so
many phases of every barrier. An access to bytes that another lane, a copy or another
CTA has stored, and a store to bytes that others have read, is a fault unless the lane
knows of those. A lane learns

    by waiting for an mbarrier   what the lanes that arrived knew when they arrived, and
                                 what was stored by the copies and remote stores that
                                 the phase counted
    by bar.sync                  what the others knew
    by a cluster barrier         what those knew whose arrival was not relaxed
    by a product, a vote or a    what the warp has read: the result needs every lane's
    shuffle                      registers
    by bar.warp.sync             what the others have done and knew; but it does not
                                 pass on what they have done

ldmatrix reads a row for the lane that gives its address, whoever gets the words.

What a lane has started to copy (cp.async) nobody may touch until it has waited for the
copy; then it is a store of that lane.

wgmma reads through the asynchronous proxy: it has to know, of every store by a lane, a
``fence.proxy.async`` of the same lane that came after it; of a cp.async, one after the
lane had waited for it. Bulk copies and remote stores need none. Its reads, of A's rows
by their warp and of B by all four, are under way until the warp has waited for it.

So a lane that arrives speaks for its own accesses and for reads that its data needs,
not for all that its warp has done before it met: compute-sanitizer's racecheck takes
it so, PTX is less strict. A relaxed arrival passes on no stores. A load under way when
its lane arrives comes after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.verify_kernels.machine.memory import Array, Barrier, Fault
from tests.verify_kernels.machine.ptx import LANES, Lanes

if TYPE_CHECKING:
    from tests.verify_kernels.machine.launch import Cta
    from tests.verify_kernels.machine.warp import Warp

#: Bytes that are followed as one.
CELL = 4
#: A store that nobody can know of.
_UNDER_WAY = 2**30
#: Barriers of a CTA that can be followed.
BARRIERS = 64


@dataclass(frozen=True)
class _Memory:
    """Of each cell of a CTA's shared memory, who touched it last.

    Attributes:
        start: address of its first cell.
        base: number of the CTA's first lane.
        writer: the column that knows of the last store, -1 if there was none.
        stored: what that column must have come to.
        read: for each lane of the CTA, what its reads must have come to.
    """

    name: str
    start: int
    base: int
    writer: Array
    stored: Array
    read: Array


@dataclass(frozen=True)
class Read:
    """A load whose data has not come."""

    memory: _Memory
    rows: Array
    cells: Array
    seen: tuple[Array, Array]


class Order:
    """What the lanes of one cluster know.

    A row of the clocks is a lane's; columns are its own reads, its own stores, the
    phases of barriers, and the stores that were fenced for the asynchronous proxy.
    """

    def __init__(self, ctas: list[Cta], shared_bytes: int) -> None:
        self._first: dict[Warp, int] = {}
        self._names: list[str] = []
        self._memory: dict[Cta, _Memory] = {}
        cells = -(-shared_bytes // CELL)
        for cta in ctas:
            base = len(self._names)
            for warp in cta.warps:
                self._first[warp] = len(self._names)
                self._names += [
                    f"lane {lane} of warp {warp.number} of {cta.name}"
                    for lane in range(LANES)
                ]
            self._memory[cta] = _Memory(
                cta.name,
                cta.shared.base,
                base,
                np.full(cells, -1, np.int32),
                np.zeros(cells, np.int32),
                np.zeros((cells, len(self._names) - base), np.int32),
            )
        self._lanes = len(self._names)
        self._fenced = 2 * self._lanes + BARRIERS * len(ctas)
        columns = self._fenced + self._lanes
        self._known = np.zeros((self._lanes, columns), np.int32)
        self._advance(np.arange(self._lanes))
        #: Reads and stores of the lanes of one's warp, known of since it last met.
        self._near = np.zeros((self._lanes, 2, LANES), np.int32)
        self._unread = dict.fromkeys(self._first, False)
        self._barriers: dict[int, int] = {}
        self._barrier_names: list[str] = []
        #: What arrivals have told a barrier, and what it tells who waits for it.
        self._told = np.zeros((BARRIERS * len(ctas), columns), np.int32)
        self._tells = self._told.copy()
        self._phase = np.zeros(len(self._told), np.int32)
        self._cluster_told = np.zeros(columns, np.int32)
        self._cluster_tells = self._cluster_told

    def _rows(self, warp: Warp, lanes: Lanes) -> Array:
        first = self._first[warp]
        return first + (np.arange(LANES) if lanes is None else np.flatnonzero(lanes))

    def _advance(self, rows: Array, stores: bool = True) -> None:
        """What these lanes do from now on is not known by what they have passed on."""
        self._known[rows, rows] += 1
        if stores:
            self._known[rows, self._lanes + rows] += 1

    def _of_warp(self, warp: Warp) -> tuple[slice, tuple[slice, slice]]:
        """Rows of a warp, and the columns of its reads and of its stores."""
        first = self._first[warp]
        rows = slice(first, first + LANES)
        return rows, (rows, slice(first + self._lanes, first + self._lanes + LANES))

    def _seen(self, warp: Warp, rows: Array) -> Array:
        """What lanes know for their own accesses."""
        known: Array = self._known[rows]
        for kind, columns in enumerate(self._of_warp(warp)[1]):
            known[:, columns] = np.maximum(known[:, columns], self._near[rows, kind])
        return known

    def _number(self, barrier: Barrier) -> int:
        """Number of a barrier, brought up to its phase."""
        number = self._barriers.setdefault(id(barrier), len(self._barriers))
        if number == len(self._barrier_names):
            if number == len(self._told):
                raise ValueError(f"more than {BARRIERS} barriers a CTA")
            self._barrier_names.append(barrier.name)
        if self._phase[number] != barrier.phase:
            self._phase[number] = barrier.phase
            self._tells[number] = self._told[number]
            self._tells[number, 2 * self._lanes + number] = barrier.phase
        return number

    def _who(self, column: int) -> str:
        if column < 2 * self._lanes:
            return self._names[column % self._lanes]
        name = self._barrier_names[column - 2 * self._lanes]
        return f"a copy or remote store counted by {name}"

    def _cells(self, memory: _Memory, places: Array, size: int) -> Array:
        first = (places.astype(np.int64) - memory.start) // CELL
        return first[:, None] + np.arange(-(-size // CELL))

    def _check_stores(
        self, memory: _Memory, cells: Array, known: Array, what: str
    ) -> None:
        """``known`` [places, columns] has to know of the last stores of ``cells``."""
        writer = memory.writer[cells]
        place = np.arange(len(cells))[:, None]
        bad = (writer >= 0) & (known[place, writer] < memory.stored[cells])
        if bad.any():
            at = tuple(np.argwhere(bad)[0])
            raise Fault(
                f"{what} at {CELL * int(cells[at])} of shared memory of {memory.name} "
                f"is not ordered with the store there by {self._who(int(writer[at]))}"
            )

    def _check_reads(
        self, memory: _Memory, cells: Array, known: Array, what: str
    ) -> None:
        reads = memory.read[cells]
        last = memory.base + reads.shape[2]
        bad = reads > known[:, None, memory.base : last]
        if bad.any():
            place, cell, lane = map(int, np.argwhere(bad)[0])
            raise Fault(
                f"{what} at {CELL * int(cells[place, cell])} of shared memory of "
                f"{memory.name} is not ordered with the read there by "
                f"{self._who(memory.base + lane)}"
            )

    def read(self, warp: Warp, lanes: Lanes, places: Array, size: int) -> Read:
        """Lanes load ``size`` bytes each; `came` must follow when the data has come."""
        memory, rows = self._memory[warp.cta], self._rows(warp, lanes)
        return self._read(memory, warp, rows, self._cells(memory, places, size))

    def _read(self, memory: _Memory, warp: Warp, rows: Array, cells: Array) -> Read:
        self._check_stores(memory, cells, self._seen(warp, rows), "a read")
        memory.read[cells, (rows - memory.base)[:, None]] = self._known[rows, rows][
            :, None
        ]
        return Read(memory, rows, cells, (memory.writer[cells], memory.stored[cells]))

    def read_async(self, warp: Warp, places: Array, size: int) -> Read:
        """A warp starts to read ``size`` bytes at each place through the asynchronous
        proxy, every lane all of them."""
        memory, rows = self._memory[warp.cta], self._rows(warp, None)
        cells = self._cells(memory, places, size).reshape(-1)
        read = self._read(
            memory, warp, rows, np.broadcast_to(cells, (LANES, len(cells)))
        )
        writer = memory.writer[cells] - self._lanes
        by_lane = (writer >= 0) & (writer < self._lanes)
        fenced = self._known[rows, self._fenced :].min(0)
        bad = by_lane & (fenced[np.where(by_lane, writer, 0)] < memory.stored[cells])
        if bad.any():
            at = int(bad.argmax())
            raise Fault(
                f"an asynchronous read at {CELL * int(cells[at])} of shared memory of "
                f"{memory.name} of a store by {self._who(int(writer[at]))}, which had "
                "no fence.proxy.async after it before it told of the store"
            )
        return read

    def fence_proxy(self, warp: Warp, lanes: Lanes) -> None:
        """Stores of these lanes so far can be seen through the asynchronous proxy by
        whoever learns of the fence."""
        rows = self._rows(warp, lanes)
        stores = self._lanes + rows
        self._known[rows, self._fenced + rows] = self._known[rows, stores]
        self._known[rows, stores] += 1

    def came(self, warp: Warp, read: Read) -> None:
        """The data of a load is in its registers."""
        memory, rows, cells = read.memory, read.rows, read.cells
        writer, stored = read.seen
        if (memory.writer[cells] != writer).any() or (
            memory.stored[cells] != stored
        ).any():
            raise Fault(
                f"a read of shared memory of {memory.name} by {self._who(int(rows[0]))}"
                " or its neighbours was under way when a store came"
            )
        memory.read[cells, (rows - memory.base)[:, None]] = self._known[rows, rows][
            :, None
        ]
        self._unread[warp] = True

    def write(self, warp: Warp, lanes: Lanes, places: Array, size: int) -> None:
        """Lanes store ``size`` bytes each."""
        memory, rows = self._memory[warp.cta], self._rows(warp, lanes)
        cells = self._cells(memory, places, size)
        known = self._seen(warp, rows)
        self._check_stores(memory, cells, known, "a store")
        self._check_reads(memory, cells, known, "a store")
        memory.writer[cells] = (self._lanes + rows)[:, None]
        memory.stored[cells] = self._known[rows, self._lanes + rows][:, None]
        memory.read[cells] = 0

    def start_copy(
        self, warp: Warp, lanes: Lanes, places: Array, size: int
    ) -> tuple[_Memory, Array, Array]:
        """Lanes start to copy ``size`` bytes each; `end_copy` must follow."""
        self.write(warp, lanes, places, size)
        memory, rows = self._memory[warp.cta], self._rows(warp, lanes)
        cells = self._cells(memory, places, size)
        memory.stored[cells] = _UNDER_WAY
        return memory, rows, cells

    def end_copy(self, started: tuple[_Memory, Array, Array]) -> None:
        """The lanes have waited for their copies."""
        memory, rows, cells = started
        # Not the store that was there before.
        self._known[rows, self._lanes + rows] += 1
        memory.stored[cells] = self._known[rows, self._lanes + rows][:, None]

    def knowledge(self, warp: Warp, lane: int) -> Array:
        """What a lane knows now, for what it starts and comes later."""
        return self._known[self._first[warp] + lane].copy()

    def land(
        self, knowledge: Array, cta: Cta, address: int, size: int, barrier: Barrier
    ) -> None:
        """A copy or remote store comes; ``barrier`` has yet to count it."""
        memory, number = self._memory[cta], self._number(barrier)
        cells = self._cells(memory, np.array([address]), size)
        what = f"what was counted by {barrier.name}"
        self._check_stores(memory, cells, knowledge[None], what)
        self._check_reads(memory, cells, knowledge[None], what)
        memory.writer[cells] = 2 * self._lanes + number
        memory.stored[cells] = barrier.phase + 1
        memory.read[cells] = 0

    def arrive(self, warp: Warp, lane: int, barrier: Barrier) -> None:
        """A lane arrives; the barrier has yet to count it."""
        self.arrive_with(self.knowledge(warp, lane), barrier)
        self._advance(np.array([self._first[warp] + lane]))

    def arrive_with(self, knowledge: Array, barrier: Barrier) -> None:
        told = self._told[self._number(barrier)]
        np.maximum(told, knowledge, out=told)

    def leave_relaxed(self, warp: Warp, lane: int) -> Array:
        """What a relaxed arrival carries: nothing of stores."""
        knowledge = self.knowledge(warp, lane)
        knowledge[self._lanes : 2 * self._lanes] = 0
        knowledge[self._fenced :] = 0
        self._advance(np.array([self._first[warp] + lane]), stores=False)
        return knowledge

    def wait(self, warp: Warp, lanes: Array, barrier: Barrier) -> None:
        """Lanes have seen that a phase of a barrier is complete."""
        self._learn(self._rows(warp, lanes), self._tells[self._number(barrier)])

    def _learn(self, rows: Array, what: Array) -> None:
        self._known[rows] = np.maximum(self._known[rows], what)

    def together(self, warp: Warp) -> None:
        """A result of the whole warp's registers, so of what it has read."""
        if not self._unread[warp]:
            return
        self._unread[warp] = False
        rows, _ = self._of_warp(warp)
        block = self._known[rows, rows]
        np.maximum(block, block.diagonal().copy(), out=block)
        block[np.arange(LANES), np.arange(LANES)] += 1

    def meet_warp(self, warp: Warp) -> None:
        """The lanes of a warp have met at ``bar.warp.sync``."""
        rows, kinds = self._of_warp(warp)
        known = self._known[rows]
        own = [known[:, columns].copy() for columns in kinds]
        np.maximum(known, known.max(0), out=known)
        for kind, (columns, before) in enumerate(zip(kinds, own, strict=True)):
            known[:, columns] = before
            self._near[rows, kind] = before.diagonal()
        self._advance(self._rows(warp, None))

    def meet(self, warps: list[Warp]) -> None:
        """Warps have met at ``bar.sync``."""
        rows = np.concatenate([self._rows(warp, None) for warp in warps])
        self._learn(rows, self._known[rows].max(0))
        self._advance(rows)

    def arrive_cluster(self, warp: Warp, lanes: Lanes) -> None:
        """Lanes arrive at the cluster's barrier, not relaxed."""
        rows = self._rows(warp, lanes)
        self._cluster_told = np.maximum(self._cluster_told, self._known[rows].max(0))
        self._advance(rows)

    def open_cluster(self) -> None:
        self._cluster_tells = self._cluster_told

    def wait_cluster(self, warp: Warp, lanes: Lanes) -> None:
        self._learn(self._rows(warp, lanes), self._cluster_tells)
