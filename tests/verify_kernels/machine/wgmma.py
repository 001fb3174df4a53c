# SPDX-License-Identifier: Apache-2.0
"""Hopper's asynchronous matrix products: wgmma of bf16, with A in registers or in
shared memory, B in shared memory; how they lie there: `machine.descriptor`.

Every warp of a warpgroup (four, the first a multiple of four) multiplies its own 16
rows, in the arithmetic of mma.sync. It reads those rows of A and all of B. What is
undefined in PTX or hangs is a fault:

    a register of A or D that is used by anything else between the product and the wait
    such a use before the product with no wgmma.fence after it
    warps of a warpgroup that differ in their sequence of wgmma and setmaxnreg, or in
    the descriptors, or of which some are missing
    products that nobody has committed or waited for when the warp ends

Shared memory is read when the product is issued or when it is waited for, and the four
warps meet at wgmma.fence or do not: the launch's seed says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.verify_kernels.machine.descriptor import (
    columns_fastest,
    rows_fastest,
    wide,
)
from tests.verify_kernels.machine.exchange import add_product, row_factor
from tests.verify_kernels.machine.memory import Fault
from tests.verify_kernels.machine.ptx import (
    Build,
    Decoded,
    Decoder,
    Execute,
    Lanes,
    Register,
)
from verify_kernels.audit.ptx import Instruction

if TYPE_CHECKING:
    from tests.verify_kernels.machine.warp import Group, Warp

#: Warps of a warpgroup.
WARPS = 4
_PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16")


@dataclass
class Warpgroup:
    """What the warps of one warpgroup have in common.

    Attributes:
        events: what every warp of it does, in order, as far as one has come.
        waiting: warps at a wgmma.fence.
    """

    events: list[tuple[Any, ...]] = field(default_factory=list)
    waiting: list[Group] = field(default_factory=list)


@dataclass(frozen=True)
class _Product:
    """A product under way; ``finish`` is called when it is waited for."""

    a: frozenset[Register]
    d: tuple[Register, ...]
    finish: Callable[[], None]


class Products:
    """The asynchronous products of one warp."""

    def __init__(self, warp: Warp) -> None:
        self._warp = warp
        self._done = 0
        self._fenced = False
        #: Used since the last fence.
        self._loose: set[Register] = set()
        self._open: list[_Product] = []
        self._groups: list[list[_Product]] = []

    @property
    def _group(self) -> Warpgroup:
        number = self._warp.number // WARPS
        return self._warp.cta.warpgroups.setdefault(number, Warpgroup())

    def _under_way(self) -> list[_Product]:
        return [p for group in (*self._groups, self._open) for p in group]

    def touch(self, registers: frozenset[Register]) -> None:
        """Something else than a product uses registers of a product."""
        for product in self._under_way():
            if not (
                registers.isdisjoint(product.a) and registers.isdisjoint(product.d)
            ):
                raise Fault(
                    "a register of a wgmma is used before wgmma.wait_group has waited "
                    "for it"
                )
        self._loose |= registers

    def event(self, *what: Any) -> None:
        """All warps of the warpgroup do the same."""
        events = self._group.events
        if self._done == len(events):
            events.append(what)
        elif events[self._done] != what:
            raise Fault(
                f"step {self._done} of a warpgroup: this warp does {what}, another did "
                f"{events[self._done]}"
            )
        self._done += 1

    def aligned(self, lanes: Lanes) -> None:
        """A whole warp of a whole warpgroup runs this."""
        self._warp.require_all()
        if lanes is not None:
            raise Fault("some lanes of the warp do not run it")
        first = self._warp.number // WARPS * WARPS
        if len(self._warp.cta.warps) < first + WARPS:
            raise Fault(f"warps {first} to {first + WARPS - 1} are not all there")

    def fence(self, group: Group) -> bool:
        """Whether the warp may go on at once."""
        self._fenced = True
        self._loose.clear()
        if not self._warp.cta.cluster.schedule.warpgroups_meet:
            group.pc += 1
            return True
        waiting = self._group.waiting
        waiting.append(group)
        group.block(lambda: f"its warpgroup, of which {len(waiting)} warps have come")
        if len(waiting) == WARPS:
            for one in waiting:
                one.pc += 1
                one.wake()
            waiting.clear()
        return group.blocked is None

    def start(self, product: _Product) -> None:
        """Check and enter a product."""
        d = frozenset(product.d)
        if not self._fenced or not self._loose.isdisjoint(product.a | d):
            raise Fault(
                "its registers have been used with no wgmma.fence between that and this"
            )
        for other in self._under_way():
            same = product.d == other.d
            if not (product.a.isdisjoint(other.d) and d.isdisjoint(other.a)) or not (
                same or d.isdisjoint(other.d)
            ):
                raise Fault("it shares registers with a wgmma that is under way")
        self._open.append(product)

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, left: int) -> None:
        """All but the last ``left`` groups come to their end."""
        count = max(len(self._groups) - left, 0)
        for product in (p for group in self._groups[:count] for p in group):
            product.finish()
        del self._groups[:count]

    def ended(self) -> None:
        """The warp has left the kernel."""
        if self._under_way():
            raise Fault("the warp ends while a wgmma has not been waited for")
        self.event("the end")


def _uniform(warp: Warp, kind: str, row: int) -> int:
    values = warp.rows[kind][row]
    if (values != values[0]).any():
        raise Fault("lanes of the warp disagree on the descriptor or scale-d")
    return int(values[0])


def _product(decoder: Decoder, ins: Instruction) -> Decoded:
    """D [64, N] = A B (+ D): A [64, 16] in registers or, K fastest, in shared memory,
    B [16, N] there, either fastest.

    Warp i has rows 16 i .., and of token tile n what mma.sync.m16n8k16 has in
    d[4 n .. 4 n + 3].
    """
    found = _PRODUCT.fullmatch(ins.opcode)
    held = len(ins.operands) > 1 and ins.operands[1].startswith("{")
    # Signs of A and B, which of them have rows fastest; of a held A none is said.
    *signs, across = ins.operands[4:] or ("",)
    if (
        found is None
        or signs != ["1", "1", *([] if held else ["0"])]
        or across not in ("0", "1")
    ):
        raise decoder.refuse("the machine does not know this form of wgmma")
    n = int(found[1])
    if n % 8 or not 8 <= n <= 256:
        raise decoder.refuse("N is a multiple of 8, 256 at most")
    tiles = n // 8
    d = decoder.rows(ins.operands[0], "f32")
    a = decoder.rows(ins.operands[1], "f32") if held else []
    if len(d) != 4 * tiles or len(a) != 4 * held:
        raise decoder.refuse(f"it takes {4 * tiles} and {4 * held} registers")
    d_registers = tuple((32, row) for row in d)
    a_registers = frozenset((32, row) for row in a)
    if len(set(d)) < len(d) or not a_registers.isdisjoint(d_registers):
        raise decoder.refuse("a register stands there twice")
    decoder.matrix.update(d_registers, a_registers)
    descriptors = [
        decoder.row(operand, "u64") for operand in ins.operands[1 + held : 3]
    ]
    add = decoder.row(ins.operands[3], "pred")
    index = decoder.index

    def run(warp: Warp, lanes: Lanes) -> None:
        products, cluster = warp.products, warp.cta.cluster
        products.aligned(lanes)
        *above, beside = (_uniform(warp, "u64", row) for row in descriptors)
        adds = bool(_uniform(warp, "pred", add))
        products.event(index, ins.opcode, *map(hex, (*above, beside)), adds)
        lay = rows_fastest if across == "1" else columns_fastest
        parts = [lay(beside, range(tiles))]
        own = 2 * (warp.number % WARPS)
        parts += [columns_fastest(one, range(own, own + 2)) for one in above]
        places = warp.cta.shared.window + np.concatenate([p.ravel() for p in parts])
        fetch = warp.cta.shared.reader(places, 4, 4)
        order = cluster.order
        read = None if order is None else order.read_async(warp, places, 16)

        def compute() -> None:
            # Contiguous, whichever is fastest: so sums have one order.
            numbers, count = wide(fetch()), 128 * tiles
            right = numbers[:count].reshape(tiles, 8, 16)
            if across == "1":
                right = right.reshape(tiles, 16, 8).transpose(0, 2, 1).copy()
            if held:
                left = row_factor(warp.rows["b32"], a)
            else:
                left = numbers[count:].reshape(16, 16)
            floats = warp.rows["f32"]
            for n in range(tiles):
                out = [floats[row] for row in d[4 * n : 4 * n + 4]]
                start = out if adds else [np.zeros(32, np.float32)] * 4
                add_product(out, start, left, right[n])

        late = cluster.schedule.products_late

        def finish() -> None:
            if late:
                compute()
            if order is not None and read is not None:
                order.came(warp, read)
                order.together(warp)

        products.start(_Product(a_registers, d_registers, finish))
        if not late:
            compute()

    return Decoded(run, together=True)


def _wgmma(decoder: Decoder, ins: Instruction) -> Decoded:
    if ins.opcode.startswith("wgmma.mma_async."):
        return _product(decoder, ins)
    index = decoder.index

    def together(act: Callable[[Products], None]) -> Execute:
        def run(warp: Warp, lanes: Lanes) -> None:
            warp.products.aligned(lanes)
            warp.products.event(index, ins.opcode)
            act(warp.products)

        return run

    if ins.opcode == "wgmma.fence.sync.aligned":

        def fence(warp: Warp, group: Group, lanes: Lanes) -> bool:
            warp.products.aligned(lanes)
            warp.products.event(index, ins.opcode)
            return warp.products.fence(group)

        return Decoded(control=fence, together=True)
    if ins.opcode == "wgmma.commit_group.sync.aligned":
        return Decoded(together(Products.commit), together=True)
    if ins.opcode == "wgmma.wait_group.sync.aligned" and ins.operands[0].isdigit():
        left = int(ins.operands[0])
        return Decoded(together(lambda products: products.wait(left)), together=True)
    raise decoder.refuse("the machine does not know this form of wgmma")


def _set_registers(decoder: Decoder, ins: Instruction) -> Decoded:
    """setmaxnreg: the machine has registers enough."""
    count = ins.operands[0]
    known = re.fullmatch(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", ins.opcode)
    if not known or not count.isdigit():
        raise decoder.refuse("the machine does not know this form of setmaxnreg")
    if int(count) % 8 or not 24 <= int(count) <= 256:
        raise decoder.refuse("it takes multiples of 8 from 24 to 256")
    index = decoder.index

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.products.aligned(lanes)
        warp.products.event(index, ins.opcode)

    return Decoded(run, together=True)


BUILDERS: dict[str, Build] = {"wgmma": _wgmma, "setmaxnreg": _set_registers}
