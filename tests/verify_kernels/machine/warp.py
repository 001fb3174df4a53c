# SPDX-License-Identifier: Apache-2.0
"""A warp: groups of lanes at different places, their branches, and what they wait for.

Lanes that part run as groups; the group furthest behind goes first, so that they meet
where their paths join. An instruction for the whole warp waits for the other lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.verify_kernels.machine.memory import Array, Fault
from tests.verify_kernels.machine.ptx import (
    LANES,
    TYPES,
    Build,
    Decoded,
    Decoder,
    Lanes,
    Op,
    Program,
    Register,
)
from tests.verify_kernels.machine.wgmma import Products
from verify_kernels.audit.ptx import Instruction

if TYPE_CHECKING:
    from tests.verify_kernels.machine.launch import Cta


class Group:
    """Lanes of a warp at one place.

    Attributes:
        pc: number of the next instruction.
        mask: bool [32]; not changed in place.
        lanes: the mask, None if all lanes are in it.
        blocked: says what the group waits for; None if it can run.
        gathering: it waits for the other lanes of its warp.
    """

    def __init__(self, pc: int, mask: Array) -> None:
        self.pc = pc
        self.blocked: Callable[[], str] | None = None
        self.gathering = False
        self.hold(mask)

    def hold(self, mask: Array) -> None:
        """Be these lanes from now on."""
        self.mask = mask
        self.lanes: Lanes = None if mask.all() else mask

    def block(self, why: Callable[[], str]) -> Callable[[], None]:
        """Stop; what is returned ends this stop and no later one."""

        def wake() -> None:
            if self.blocked is why:
                self.wake()

        self.blocked = why
        return wake

    def wake(self) -> None:
        self.blocked = None
        self.gathering = False


@dataclass(frozen=True, eq=False)
class Pending:
    """A load whose data has not come, or arithmetic on such data.

    Attributes:
        space: state space of a load, "" for arithmetic.
    """

    space: str
    reads: frozenset[Register]
    writes: frozenset[Register]
    finish: Callable[[], None]


@dataclass(eq=False)
class Copy:
    """An asynchronous copy by the lanes of a warp.

    Attributes:
        come: writes the data.
        waited_for: says that the lanes may use it.
        landed: the data has come.
    """

    come: Callable[[], None]
    waited_for: Callable[[], None]
    landed: bool = False

    def land(self) -> None:
        if not self.landed:
            self.landed = True
            self.come()


#: Instructions that may be pending in a warp; beyond them all are finished.
MOST_PENDING = 400


class Warp:
    """Registers and places of 32 lanes.

    Attributes:
        cta: the CTA it belongs to.
        number: its place in the CTA.
        rows: for each type, every register of that size as [32] of the type.
        waited: bool [32], past ``griddepcontrol.wait``.
        joined: [32], phase of the cluster's barrier that a lane has arrived in, -1 if
            it has none to wait for.
        executed: instructions so far.
        products: those that wgmma has started.
    """

    def __init__(
        self, cta: Cta, number: int, program: Program, special: dict[str, Array]
    ) -> None:
        self.cta, self.number = cta, number
        self._ops: tuple[Op, ...] = program.ops
        self.rows: dict[str, list[Array]] = {}
        for bits, initial in program.initial.items():
            bank = initial.copy()
            for name, row in program.special.items() if bits == 32 else ():
                bank[row] = special[name]
            for kind, dtype in TYPES[bits].items():
                self.rows[kind] = list(bank.view(dtype))
        mask = special["lives"].astype(np.bool_)
        self._started = int(mask.sum())
        self.groups = [Group(0, mask)]
        self.waited = np.full(LANES, not cta.cluster.pdl)
        self.joined = np.full(LANES, -1)
        self.executed = 0
        self.products = Products(self)
        self._pending: list[Pending] = []
        self._late: set[Register] = set()
        self._copies: list[Copy] = []
        self._copy_groups: list[list[Copy]] = []

    @property
    def runnable(self) -> bool:
        # A loop: this runs for every warp at every turn.
        for group in self.groups:  # noqa: SIM110
            if group.blocked is None:
                return True
        return False

    @property
    def lanes_left(self) -> int:
        return sum(int(group.mask.sum()) for group in self.groups)

    def issue(
        self, space: str, writes: frozenset[Register], finish: Callable[[], None]
    ) -> None:
        """Start a load; when its data comes is the schedule's choice."""
        if self.cta.cluster.schedule.loads_at_once:
            finish()
        else:
            self._delay(Pending(space, frozenset(), writes, finish))

    def start_copy(
        self, come: Callable[[], None], waited_for: Callable[[], None]
    ) -> None:
        """Start a copy; when its data comes is the schedule's choice."""
        self._copies.append(Copy(come, waited_for))

    def commit_copies(self, lanes: Lanes) -> None:
        """What has been started since the last time is a group."""
        self._whole(lanes)
        self._copy_groups.append(self._copies)
        self._copies = []

    def wait_copies(self, left: int, lanes: Lanes) -> None:
        """All but the last ``left`` groups have come."""
        self._whole(lanes)
        count = max(len(self._copy_groups) - left, 0)
        for copy in (c for group in self._copy_groups[:count] for c in group):
            copy.land()
            copy.waited_for()
        del self._copy_groups[:count]

    def _whole(self, lanes: Lanes) -> None:
        if lanes is not None:
            raise Fault("the machine counts groups of copies for whole warps only")

    def _copies_under_way(self) -> list[Copy]:
        return [c for group in (*self._copy_groups, self._copies) for c in group]

    def land(self, space: str = "") -> None:
        """The data of all loads comes, or of those from one state space."""
        for load in self._pending.copy():
            if load.space and space in ("", load.space):
                self._need(frozenset(), load.writes)

    def _land_some(self) -> None:
        """Data comes for some of the loads under way."""
        schedule = self.cta.cluster.schedule
        for load in self._pending.copy():
            if load.space and schedule.data_comes():
                self._need(frozenset(), load.writes)
        for copy in self._copies_under_way():
            if not copy.landed and schedule.data_comes():
                copy.land()

    def _delay(self, pending: Pending) -> None:
        if len(self._pending) >= MOST_PENDING:
            everything = frozenset(self._late)
            self._need(everything, everything)
        self._pending.append(pending)
        self._late |= pending.reads
        self._late |= pending.writes

    def _need(self, reads: frozenset[Register], writes: frozenset[Register]) -> None:
        """Finish, in order, what must come before these registers are read and written:
        nothing else, so that the rest stays as late as it may be."""
        read, written = set(reads), set(writes)
        first, later = [], []
        for pending in reversed(self._pending):
            if (
                pending.writes.isdisjoint(read)
                and pending.writes.isdisjoint(written)
                and pending.reads.isdisjoint(written)
            ):
                later.append(pending)
            else:
                first.append(pending)
                read |= pending.reads
                written |= pending.writes
        for pending in reversed(first):
            pending.finish()
        self._pending = later[::-1]
        self._late = set().union(*(p.reads | p.writes for p in self._pending))

    def data_met(self) -> None:
        """A result of all lanes' registers has been computed."""
        if self.cta.cluster.order is not None:
            self.cta.cluster.order.together(self)

    def require_all(self) -> None:
        if self.lanes_left != self._started:
            raise Fault("lanes of this warp have ended, and this waits for them")

    def turn(self, budget: int) -> None:
        """Run up to ``budget`` instructions of the group furthest behind."""
        self._land_some()
        group = self._furthest_behind()
        for _ in range(budget):
            op = self._ops[group.pc]
            if op.together and not self._gathered(group):
                if not self.runnable:
                    return
                group = self._furthest_behind()
                continue
            self.executed += 1
            try:
                going = self._execute(op, group)
            except Fault as fault:
                raise Fault(f"{self.where(op, group)}: {fault}") from None
            if len(self.groups) != 1:
                self._meet(group)
                if not self.runnable:
                    return
                group = self._furthest_behind()
            if not going:
                return

    def _furthest_behind(self) -> Group:
        able = (group for group in self.groups if group.blocked is None)
        return min(able, key=lambda group: group.pc)

    def _execute(self, op: Op, group: Group) -> bool:
        late = bool(self._late) and not (
            self._late.isdisjoint(op.reads) and self._late.isdisjoint(op.writes)
        )
        if late and not op.pure:
            self._need(op.reads, op.writes)
        lanes = group.lanes
        if op.guard >= 0:
            lanes = self.rows["pred"][op.guard] ^ op.negated
            lanes &= group.mask
            if not lanes.any():
                group.pc += 1
                return True
            lanes = None if lanes.all() else lanes
        if op.matrix:
            self.products.touch(op.matrix)
        if op.control is not None:
            return op.control(self, group, lanes)
        assert op.plain is not None
        if late and op.pure:
            finish = functools.partial(op.plain, self, lanes)
            self._delay(Pending("", op.reads, op.writes, finish))
        else:
            op.plain(self, lanes)
        group.pc += 1
        return True

    def _gathered(self, group: Group) -> bool:
        """Whether all lanes that are left are in ``group``; else it waits for them."""
        if len(self.groups) > 1:
            self._meet(group)
        if len(self.groups) == 1:
            return True
        group.block(lambda: "the other lanes of its warp")
        group.gathering = True
        return False

    def _meet(self, group: Group) -> None:
        """Join ``group`` with the lanes that wait or stand at the same place."""
        met = [g for g in self.groups if g is not group and g.pc == group.pc]
        if group in self.groups and met:
            for other in met:
                group.hold(group.mask | other.mask)
                self.groups.remove(other)
            group.wake()
        self._end_gathering()

    def _end_gathering(self) -> None:
        if len(self.groups) == 1 and self.groups[0].gathering:
            self.groups[0].wake()

    def end(self, group: Group, lanes: Lanes) -> None:
        """Lanes of a group leave the kernel; others may have waited for them alone."""
        group.hold(group.mask & ~(group.mask if lanes is None else lanes))
        if not group.mask.any():
            self.groups.remove(group)
        self._end_gathering()
        self.cta.cluster.barrier.ended()
        if not self.groups:
            self.products.ended()
            if self._copies_under_way():
                raise Fault("the warp ends while a copy has not been waited for")
            self.cta.ended()

    def where(self, op: Op, group: Group) -> str:
        lanes = sum(1 << int(i) for i in np.flatnonzero(group.mask))
        return (
            f"{self.cta.name}, warp {self.number}, lanes {lanes:#010x}, line {op.line} "
            f"`{op.text}`"
        )

    def stuck(self) -> list[str]:
        """A line for each group that cannot go on."""
        return [
            f"{self.where(self._ops[g.pc], g)} waits for {g.blocked()}"
            for g in self.groups
            if g.blocked is not None
        ]


def leave(warp: Warp, group: Group, lanes: Lanes) -> bool:
    """ret, exit and the end of the code."""
    rest = lanes is not None and bool((group.mask & ~lanes).any())
    warp.end(group, lanes)
    group.pc += 1
    return rest


def _leave(decoder: Decoder, ins: Instruction) -> Decoded:
    return Decoded(control=leave)


def _branch(decoder: Decoder, ins: Instruction) -> Decoded:
    target = decoder.entry.successors[decoder.index][0]

    def run(warp: Warp, group: Group, lanes: Lanes) -> bool:
        rest = None if lanes is None else group.mask & ~lanes
        if rest is None or not rest.any():
            group.pc = target
            return True
        assert lanes is not None
        warp.groups.append(Group(target, lanes))
        group.hold(rest)
        group.pc += 1
        return True

    return Decoded(control=run)


def _meet_warp(warp: Warp, lanes: Lanes) -> None:
    warp.require_all()
    if warp.cta.cluster.order is not None:
        warp.cta.cluster.order.meet_warp(warp)


def _bar(decoder: Decoder, ins: Instruction) -> Decoded:
    if ins.opcode == "bar.warp.sync":
        # Compiled code has no instruction here that would wait for the data of loads.
        return Decoded(_meet_warp, together=True)
    if ins.opcode != "bar.sync":
        raise decoder.refuse("the machine does not know this barrier instruction")
    if not all(operand.isdigit() for operand in ins.operands):
        raise decoder.refuse("the machine takes constants for bar.sync only")
    number = int(ins.operands[0])
    threads = int(ins.operands[1]) if len(ins.operands) > 1 else 0

    def run(warp: Warp, group: Group, lanes: Lanes) -> bool:
        warp.land()
        return warp.cta.arrive(group, number, threads)

    return Decoded(control=run, together=True)


def _cluster_barrier(decoder: Decoder, ins: Instruction) -> Decoded:
    _, scope, what, *how = ins.opcode.split(".")
    if scope != "cluster" or what not in ("arrive", "wait"):
        raise decoder.refuse("the machine does not know this barrier instruction")

    def arrive(warp: Warp, lanes: Lanes) -> None:
        if "relaxed" not in how:
            warp.land()
        warp.cta.cluster.barrier.arrive(warp, lanes, "relaxed" in how)

    def wait(warp: Warp, group: Group, lanes: Lanes) -> bool:
        return warp.cta.cluster.barrier.wait(warp, group, lanes)

    return Decoded(control=wait) if what == "wait" else Decoded(arrive)


def _grid_dependency(decoder: Decoder, ins: Instruction) -> Decoded:
    def run(warp: Warp, lanes: Lanes) -> None:
        warp.waited[() if lanes is None else lanes] = True

    if ins.opcode == "griddepcontrol.wait":
        return Decoded(run)
    return Decoded(lambda warp, lanes: None)


BUILDERS: dict[str, Build] = {
    "bra": _branch,
    "ret": _leave,
    "exit": _leave,
    "bar": _bar,
    "barrier": _cluster_barrier,
    "griddepcontrol": _grid_dependency,
}
