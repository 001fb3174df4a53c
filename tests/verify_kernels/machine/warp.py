# SPDX-License-Identifier: Apache-2.0
"""A warp: groups of lanes at different places, their branches, and what they wait for.

Lanes that part run as groups; the group furthest behind goes first, so that they meet
where their paths join. An instruction for the whole warp waits for the other lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.verify_kernels.machine.memory import Array, Fault, Fetch
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
from verify_kernels.audit.ptx import Instruction

if TYPE_CHECKING:
    from tests.verify_kernels.machine.launch import Cta


@dataclass(eq=False)
class Group:
    """Lanes of a warp at one place.

    Attributes:
        pc: number of the next instruction.
        mask: bool [32].
        blocked: says what the group waits for; None if it can run.
        gathering: it waits for the other lanes of its warp.
    """

    pc: int
    mask: Array
    blocked: Callable[[], str] | None = None
    gathering: bool = False

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

    @property
    def lanes(self) -> Lanes:
        return None if self.mask.all() else self.mask


@dataclass(eq=False)
class Load:
    """A load whose data has not reached its registers yet."""

    space: str
    fetch: Fetch
    targets: list[tuple[str, int]]
    registers: frozenset[Register]
    lanes: Lanes
    signed: np.dtype[Any] | None

    def land(self, rows: dict[str, list[Array]]) -> None:
        values = self.fetch()
        if self.signed is not None:
            values = values.view(self.signed)
        for (kind, row), column in zip(self.targets, values.T, strict=True):
            target = rows[kind][row]
            if column.dtype.itemsize == target.dtype.itemsize:
                column = np.ascontiguousarray(column).view(target.dtype)
            if self.lanes is None:
                target[:] = column
            else:
                target[self.lanes] = column


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
        self._late: dict[Register, Load] = {}

    @property
    def runnable(self) -> bool:
        return any(group.blocked is None for group in self.groups)

    @property
    def lanes_left(self) -> int:
        return sum(int(group.mask.sum()) for group in self.groups)

    def issue(self, load: Load) -> None:
        """Start a load; when its data comes is the schedule's choice."""
        if self.cta.cluster.schedule.loads_at_once:
            load.land(self.rows)
        else:
            self._late.update(dict.fromkeys(load.registers, load))

    def land(self, touched: frozenset[Register] | None = None, space: str = "") -> None:
        """Data comes for loads of these registers, or of this space, or for all."""
        for register, load in list(self._late.items()):
            if register not in self._late or (space and load.space != space):
                continue
            if touched is None or not touched.isdisjoint(load.registers):
                load.land(self.rows)
                for each in load.registers:
                    del self._late[each]

    def land_some(self) -> None:
        """Data comes for a load or two of those under way."""
        schedule = self.cta.cluster.schedule
        for register in list(self._late):
            if register in self._late and schedule.data_comes():
                self.land(frozenset((register,)))

    def require_all(self) -> None:
        if self.lanes_left != self._started:
            raise Fault("lanes of this warp have ended, and this waits for them")

    def turn(self, budget: int) -> None:
        """Run up to ``budget`` instructions of the group furthest behind."""
        self.land_some()
        group = self._furthest_behind()
        for _ in range(budget):
            op = self._ops[group.pc]
            if op.together and len(self.groups) > 1:
                group.block(lambda: "the other lanes of its warp")
                group.gathering = True
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
        if self._late and not op.registers.isdisjoint(self._late):
            self.land(op.registers)
        lanes = group.lanes
        if op.guard >= 0:
            lanes = self.rows["pred"][op.guard] ^ op.negated
            lanes &= group.mask
            if not lanes.any():
                group.pc += 1
                return True
            lanes = None if lanes.all() else lanes
        if op.control is not None:
            return op.control(self, group, lanes)
        assert op.plain is not None
        op.plain(self, lanes)
        group.pc += 1
        return True

    def _meet(self, group: Group) -> None:
        """Join ``group`` with lanes that wait or stand at the same place."""
        if group not in self.groups:
            return
        for other in self.groups:
            if other is not group and other.pc == group.pc:
                group.mask = group.mask | other.mask
                group.wake()
                other.wake()
                self.groups.remove(other)
                break
        if len(self.groups) == 1 and self.groups[0].gathering:
            self.groups[0].wake()

    def end(self, group: Group, lanes: Lanes) -> None:
        """Lanes of a group leave the kernel."""
        leaving = group.mask if lanes is None else lanes
        group.mask = group.mask & ~leaving
        if not group.mask.any():
            self.groups.remove(group)
        if len(self.groups) == 1 and self.groups[0].gathering:
            self.groups[0].wake()
        self.cta.cluster.barrier.end(self, leaving)
        self.cta.end(self)

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
        group.mask = rest
        group.pc += 1
        return True

    return Decoded(control=run)


def _bar(decoder: Decoder, ins: Instruction) -> Decoded:
    if ins.opcode == "bar.warp.sync":
        # Compiled code has no instruction here that would wait for the data of loads.
        return Decoded(lambda warp, lanes: warp.require_all(), together=True)
    if ins.opcode != "bar.sync":
        raise decoder.refuse("the machine does not know this barrier instruction")
    number = int(ins.operands[0])
    threads = int(ins.operands[1]) if len(ins.operands) > 1 else 0

    def run(warp: Warp, group: Group, lanes: Lanes) -> bool:
        warp.land()
        return warp.cta.arrive(warp, group, number, threads)

    return Decoded(control=run, together=True)


def _cluster_barrier(decoder: Decoder, ins: Instruction) -> Decoded:
    _, scope, what, *how = ins.opcode.split(".")
    if scope != "cluster" or what not in ("arrive", "wait"):
        raise decoder.refuse("the machine does not know this barrier instruction")

    def arrive(warp: Warp, lanes: Lanes) -> None:
        if "relaxed" not in how:
            warp.land()
        warp.cta.cluster.barrier.arrive(warp, lanes)

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
