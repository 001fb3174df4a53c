# SPDX-License-Identifier: Apache-2.0
"""CTAs, clusters and the schedule of a launch."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.bench.neighbours import STALE
from tests.verify_kernels.machine.memory import (
    Array,
    Fault,
    GlobalMemory,
    SharedMemory,
)
from tests.verify_kernels.machine.order import Order
from tests.verify_kernels.machine.ptx import LANES, SHARED, Lanes, Program, decode
from tests.verify_kernels.machine.warp import Group, Warp
from tests.verify_kernels.machine.wgmma import Warpgroup

Size = tuple[int, int, int]


class Deadlock(Fault):
    """No warp can go on; the message says where each stands and what it waits for."""


class Schedule:
    """The choices of one launch, from its seed.

    Attributes:
        leader: the lane that ``elect.sync`` names.
        loads_at_once: the data of a load comes with the load.
        products_late: a wgmma reads when it is waited for, not when it is issued.
        warpgroups_meet: a wgmma.fence waits for all warps of the warpgroup.
        stale: the word that earlier kernels left all over shared memory.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.leader = self._random.randrange(LANES)
        self._landing = self._random.choice((1.0, 0.3, 0.05, 0.0))
        self._coming = self._random.choice((1.0, 0.3, 0.05, 0.0))
        self.loads_at_once = self._coming == 1.0
        # Apart, so that the choices for kernels without wgmma do not depend on these.
        apart = random.Random(f"wgmma {seed}")
        self.products_late = apart.random() < 0.5
        self.warpgroups_meet = apart.random() < 0.5
        self.stale = STALE[seed % len(STALE)]

    def starved(self, warps: int) -> int:
        """Which warp of each CTA runs only when no other can; -1 for none."""
        return self._random.choice((-1, *range(warps)))

    def pace(self) -> int:
        """Mean instructions that a warp runs at a time."""
        return self._random.choice((2, 8, 40, 200))

    def budget(self, pace: int) -> int:
        return 1 + int(self._random.expovariate(1 / pace))

    def pick(self, count: int) -> int:
        return self._random.randrange(count)

    def lands(self) -> bool:
        """Whether something asynchronous lands now."""
        return self._random.random() < self._landing

    def data_comes(self) -> bool:
        """Whether the data of a load comes before it is needed."""
        return self._random.random() < self._coming

    def gives_up(self) -> bool:
        """Whether a ``try_wait`` returns without success."""
        return self._random.random() < 0.1

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Parts of a bulk copy of ``size`` bytes, which land on their own."""
        cuts = {0, size, 16 * self._random.randrange(size // 16)}
        return itertools.pairwise(sorted(cuts))


@dataclass(frozen=True)
class _Flight:
    """Something asynchronous on its way to a CTA's shared memory."""

    target: Cta
    land: Callable[[], None]
    text: str


class Cta:
    """One CTA: its shared memory, its warps and their barriers.

    Attributes:
        left: all of its threads have ended.
        warpgroups: by number, those of which a warp has used wgmma or ended.
    """

    def __init__(
        self, cluster: Cluster, name: str, shared_bytes: int, rank: int
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.shared = SharedMemory(
            shared_bytes, f"shared memory of {name}", rank, cluster.schedule.stale
        )
        self.warps: list[Warp] = []
        self.left = False
        self.warpgroups: dict[int, Warpgroup] = {}
        self._waiting: dict[int, list[Group]] = {}
        self._threads: dict[int, int] = {}

    def arrive(self, group: Group, number: int, threads: int) -> bool:
        """A warp comes to ``bar.sync``; whether it may go on at once."""
        waiting = self._waiting.setdefault(number, [])
        if self._threads.setdefault(number, threads) != threads:
            raise Fault(f"barrier {number} is used with two numbers of threads")
        waiting.append(group)
        group.block(
            lambda: f"bar.sync {number}, to which {len(waiting)} warps have come"
        )
        self._open(number)
        return group.blocked is None

    def _open(self, number: int) -> None:
        waiting, threads = self._waiting[number], self._threads[number]
        come = LANES * len(waiting)
        if threads > come or (not threads and len(waiting) < len(self._alive())):
            return
        del self._waiting[number], self._threads[number]
        if self.cluster.order is not None:
            come = [w for w in self.warps if any(g in waiting for g in w.groups)]
            self.cluster.order.meet(come)
        for group in waiting:
            group.pc += 1
            group.wake()

    def _alive(self) -> list[Warp]:
        return [warp for warp in self.warps if warp.groups]

    def ended(self) -> None:
        """A warp has ended; the others may have waited for it alone."""
        for number in list(self._waiting):
            self._open(number)
        self.left = not self._alive()


class ClusterBarrier:
    """``barrier.cluster``: every thread of the cluster arrives, then waits."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._phase = 0
        self._waiting: list[Callable[[], None]] = []

    def arrive(self, warp: Warp, lanes: Lanes, relaxed: bool) -> None:
        which = np.full(LANES, True) if lanes is None else lanes
        if (warp.joined[which] >= 0).any():
            raise Fault("a second arrival without a wait")
        warp.joined[which] = self._phase
        if self._cluster.order is not None and not relaxed:
            self._cluster.order.arrive_cluster(warp, lanes)
        self._open()

    def wait(self, warp: Warp, group: Group, lanes: Lanes) -> bool:
        which = np.full(LANES, True) if lanes is None else lanes
        if (warp.joined[which] < 0).any():
            raise Fault("a wait without an arrival")
        if (warp.joined[which] == self._phase).any():
            wake = group.block(
                lambda: f"the cluster, of which {self._missing()} threads have not come"
            )
            self._waiting.append(wake)
            return False
        warp.joined[which] = -1
        if self._cluster.order is not None:
            self._cluster.order.wait_cluster(warp, lanes)
        group.pc += 1
        return True

    def ended(self) -> None:
        """Threads have ended; the others may have waited for them alone."""
        if self._waiting:
            self._open()

    def _missing(self) -> int:
        """Threads that have neither arrived nor ended."""
        return sum(
            int((group.mask & (warp.joined != self._phase)).sum())
            for warp in self._cluster.warps
            for group in warp.groups
        )

    def _open(self) -> None:
        if self._missing():
            return
        self._phase += 1
        if self._cluster.order is not None:
            self._cluster.order.open_cluster()
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


class Cluster:
    """The CTAs of one cluster, run until all have ended.

    Attributes:
        order: which accesses to shared memory are ordered; None if nobody asked.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        parameters: Mapping[str, bytes],
        pdl: bool,
        schedule: Schedule,
    ) -> None:
        self.memory, self.parameters = memory, parameters
        self.pdl, self.schedule = pdl, schedule
        self.ctas: list[Cta] = []
        self.order: Order | None = None
        self.barrier = ClusterBarrier(self)
        self._flights: list[_Flight] = []

    @property
    def warps(self) -> Iterator[Warp]:
        return (warp for cta in self.ctas for warp in cta.warps)

    def send(self, target: Cta, land: Callable[[], None], text: str) -> None:
        """Something asynchronous starts; it lands when the schedule says so."""
        self._flights.append(_Flight(target, land, text))

    def _land_one(self) -> None:
        flight = self._flights.pop(self.schedule.pick(len(self._flights)))
        try:
            if flight.target.left:
                raise Fault("it came when all threads of the CTA had ended")
            flight.land()
        except Fault as fault:
            name = flight.target.name
            raise Fault(f"`{flight.text}`, under way to {name}: {fault}") from None

    def run(self) -> int:
        """Number of instructions that the warps ran."""
        warps = list(self.warps)
        pace = {warp: self.schedule.pace() for warp in warps}
        starved = self.schedule.starved(len(self.ctas[0].warps))
        while True:
            able = [warp for warp in warps if warp.runnable]
            able = [warp for warp in able if warp.number != starved] or able
            if self._flights and (not able or self.schedule.lands()):
                self._land_one()
            elif able:
                warp = able[self.schedule.pick(len(able))]
                warp.turn(self.schedule.budget(pace[warp]))
            elif any(warp.groups for warp in warps):
                lines = [line for warp in warps for line in warp.stuck()]
                raise Deadlock("no warp can go on:\n" + "\n".join(lines))
            else:
                return sum(warp.executed for warp in warps)


def tensor_argument(
    address: int, extents: Sequence[int] = (), strides: Sequence[int] = ()
) -> bytes:
    """A tensor as CuTe DSL passes it: address, then extents (32 bits) and strides
    (64 bits) that were open when it was compiled, in elements."""
    head = struct.pack(f"<Q{len(extents)}i", address, *extents)
    return head + bytes(-len(head) % 8) + struct.pack(f"<{len(strides)}q", *strides)


def launch(
    ptx: str,
    memory: GlobalMemory,
    parameters: Sequence[bytes],
    *,
    grid: Size,
    block: Size,
    cluster: Size = (1, 1, 1),
    shared_bytes: int = 0,
    pdl: bool = True,
    seed: int = 0,
    races: bool = False,
) -> int:
    """Run the one kernel of a PTX module, cluster after cluster in any order.

    Args:
        ptx: the module.
        memory: what the kernel may read and write.
        parameters: bytes of each parameter, in order; see `tensor_argument`.
        grid, block, cluster: as for a GPU; ``grid`` in CTAs.
        shared_bytes: dynamic shared memory of a CTA.
        pdl: earlier kernels may still run until ``griddepcontrol.wait``.
        seed: which of the possible launches.
        races: refuse accesses to shared memory that nothing orders (`machine.order`).

    Returns:
        the number of warp instructions that ran.

    Raises:
        ValueError: a module, parameters or sizes that do not fit each other.
        Fault: what a GPU would stop at.
        Deadlock: no warp can go on.
    """
    program = decode(ptx)
    sizes = list(program.parameters.values())
    if [len(p) for p in parameters] != sizes:
        raise ValueError(
            f"parameters have {[len(p) for p in parameters]} bytes; the kernel "
            f"declares {sizes}"
        )
    if program.block not in (None, block):
        raise ValueError(f"block is {block}; the kernel demands {program.block}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid {grid} is not a multiple of cluster {cluster}")
    named = dict(zip(program.parameters, parameters, strict=True))
    schedule = Schedule(seed)
    places = [range(n // c) for n, c in zip(grid, cluster, strict=True)]
    order = list(itertools.product(*places))
    executed = 0
    # NaN and overflow are data here.
    with np.errstate(all="ignore"):
        while order:
            place = order.pop(schedule.pick(len(order)))
            one = Cluster(memory, named, pdl, schedule)
            _fill(one, program, place, grid, block, cluster, shared_bytes)
            if races:
                one.order = Order(one.ctas, shared_bytes)
            executed += one.run()
    return executed


def _fill(
    cluster: Cluster,
    program: Program,
    place: Sequence[int],
    grid: Size,
    block: Size,
    size: Size,
    shared_bytes: int,
) -> None:
    """Put the CTAs of the cluster at ``place`` into it."""
    inner = [(x, y, z) for z, y, x in itertools.product(*map(range, size[::-1]))]
    threads = np.arange(-(-np.prod(block) // LANES) * LANES)
    for rank, offset in enumerate(inner):
        at = [p * s + o for p, s, o in zip(place, size, offset, strict=True)]
        cta = Cta(cluster, f"CTA {tuple(at)}", shared_bytes, rank)
        cluster.ctas.append(cta)
        values: dict[str, Array | int] = {
            "%tid.x": threads % block[0],
            "%tid.y": threads // block[0] % block[1],
            "%tid.z": threads // (block[0] * block[1]),
            "%laneid": threads % LANES,
            "%cluster_ctarank": rank,
            "%cluster_nctarank": len(inner),
            SHARED: cta.shared.base,
            "lives": threads < np.prod(block),
        }
        for axis, name in enumerate("xyz"):
            values[f"%ntid.{name}"] = block[axis]
            values[f"%ctaid.{name}"] = at[axis]
            values[f"%nctaid.{name}"] = grid[axis]
        spread = {k: np.broadcast_to(v, threads.shape) for k, v in values.items()}
        for number in range(len(threads) // LANES):
            part = slice(number * LANES, (number + 1) * LANES)
            special = {k: v[part] for k, v in spread.items()}
            cta.warps.append(Warp(cta, number, program, special))
