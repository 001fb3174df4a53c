# SPDX-License-Identifier: Apache-2.0
"""Decoding: every instruction of a kernel becomes one Python function."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.verify_kernels.machine.memory import Array
from verify_kernels.audit.ptx import Entry, Instruction, names_in, parse, split_operands

if TYPE_CHECKING:
    from tests.verify_kernels.machine.warp import Group, Warp

LANES = 32
#: Which of the 32 lanes run an instruction; None for all.
Lanes = Array | None
Execute = Callable[["Warp", Lanes], None]
#: Sets the group's place itself; False ends the warp's turn.
Control = Callable[["Warp", "Group", Lanes], bool]
#: A register: its bits (1 for a predicate) and its row among those of the same size.
Register = tuple[int, int]

#: The types that registers of a size are seen as.
TYPES: dict[int, dict[str, Any]] = {
    1: {"pred": np.bool_},
    16: {"b16": np.uint16, "u16": np.uint16, "s16": np.int16, "bf16": np.uint16},
    32: {
        **{"b32": np.uint32, "u32": np.uint32, "s32": np.int32},
        **{"f32": np.float32, "bf16x2": np.uint32},
    },
    64: {"b64": np.uint64, "u64": np.uint64, "s64": np.int64},
}
BITS = {kind: bits for bits, kinds in TYPES.items() for kind in kinds}
SPECIAL = re.compile(
    r"%laneid|%(?:tid|ntid|ctaid|nctaid)\.[xyz]|%cluster_(?:ctarank|nctarank)"
)

#: Stands for every shared variable: where the CTA's dynamic shared memory begins.
SHARED = "shared"


@dataclass(frozen=True)
class Op:
    """One instruction, decoded.

    Attributes:
        text, line: as in the PTX.
        plain: what it does, if it goes on to the next instruction at once.
        control: what it does, else.
        together: all lanes of the warp take part, so they meet here first.
        guard: row of the predicate it runs under, -1 if it always runs.
        negated: runs where the predicate is false.
        pure: nothing but registers is concerned, and no other lane.
        reads, writes: registers; of an instruction that is not pure, all it names.
        matrix: of them those that a wgmma has as A or D, but for wgmma itself.
    """

    text: str
    line: int
    plain: Execute | None
    control: Control | None
    together: bool
    guard: int
    negated: bool
    pure: bool
    reads: frozenset[Register]
    writes: frozenset[Register]
    matrix: frozenset[Register] = frozenset()


@dataclass(frozen=True)
class Program:
    """One kernel.

    Attributes:
        ops: one an instruction, and a last one that ends the kernel.
        initial: contents of every register at the start, by size: constants, and else
            NaN; [registers, lanes].
        special: rows of the 32-bit registers that hold %tid.x and its like, and the
            address of shared memory.
        parameters: bytes of every parameter.
        block: threads of a CTA as the kernel demands them, None if it does not.
    """

    ops: tuple[Op, ...]
    initial: Mapping[int, Array]
    special: Mapping[str, int]
    parameters: Mapping[str, int]
    block: tuple[int, int, int] | None


class Decoder:
    """Finds the registers and constants of a kernel's operands.

    Attributes:
        entry: the kernel.
        index, ins: the instruction being decoded.
        matrix: registers that a wgmma has as A or D, so far.
    """

    def __init__(self, entry: Entry, parameters: Mapping[str, int]) -> None:
        self.entry = entry
        self.parameters = parameters
        self.index, self.ins = 0, entry.instructions[0]
        self.registers: dict[str, Register] = {}
        self.special: dict[str, int] = {}
        self.matrix: set[Register] = set()
        self._count = dict.fromkeys(TYPES, 0)
        self._constants: dict[tuple[int, int], int] = {}
        for name, kind in entry.registers.items():
            bits = 1 if kind == ".pred" else int(re.sub(r"\D", "", kind))
            self.registers[name] = (bits, self._new(bits))

    def _new(self, bits: int) -> int:
        self._count[bits] += 1
        return self._count[bits] - 1

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"line {self.ins.line}: `{self.ins.text}`: {why}")

    def row(self, text: str, kind: str) -> int:
        """Row of an operand, a register or a constant, that is seen as ``kind``."""
        if kind not in BITS:
            raise self.refuse(f"the machine has no type {kind}")
        bits = BITS[kind]
        if found := self.registers.get(text):
            if found[0] != bits:
                raise self.refuse(f"{text} has {found[0]} bits, not {bits}")
            return found[1]
        shared = self.entry.variables.get(text) == "shared"
        if shared and bits != 32:
            raise self.refuse(f"the shared address {text} has 32 bits, not {bits}")
        if shared or SPECIAL.fullmatch(text):
            name = SHARED if shared else text
            if name not in self.special:
                self.special[name] = self._new(32)
            return self.special[name]
        return self._constant(bits, self._value(text))

    def _value(self, text: str) -> int:
        if text.startswith("0f"):
            return int(text[2:], 16)
        try:
            return int(text, 0)
        except ValueError:
            raise self.refuse(f"the machine does not know the operand {text}") from None

    def _constant(self, bits: int, value: int) -> int:
        key = (bits, value & (1 << bits) - 1)
        if key not in self._constants:
            self._constants[key] = self._new(bits)
        return self._constants[key]

    def rows(self, text: str, kind: str) -> list[int]:
        """Rows of ``{a, b, ..}``, or of one operand."""
        parts = split_operands(text[1:-1]) if text.startswith("{") else (text,)
        return [self.row(part, kind) for part in parts]

    def address(self, text: str, bits: int) -> tuple[int, int]:
        """Row and displacement of ``[a+n]``; a has 32 or 64 bits."""
        found = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if found is None:
            raise self.refuse(f"the machine does not know the address {text}")
        return self.row(found[1], f"u{bits}"), int(found[2] or 0)

    def named(self, operands: Iterable[str]) -> frozenset[Register]:
        """Registers in operands."""
        names = (name for operand in operands for name in names_in(operand))
        return frozenset(self.registers[n] for n in names if n in self.registers)

    def op(self, what: Decoded) -> Op:
        """The instruction at hand, which does ``what``."""
        ins = self.ins
        guard = self.row(ins.guard, "pred") if ins.guard else -1
        pure = what.pure and guard < 0
        every = self.named((ins.guard, *ins.operands))
        return Op(
            ins.text,
            ins.line,
            what.plain,
            what.control,
            what.together,
            guard,
            ins.text.startswith("@!"),
            pure,
            self.named(ins.operands[1:]) if pure else every,
            self.named(ins.operands[:1]) if pure else every,
        )

    def initial(self) -> dict[int, Array]:
        found: dict[int, Array] = {1: np.zeros((self._count[1], LANES), np.bool_)}
        for bits in (16, 32, 64):
            full = np.full((self._count[bits], LANES), 2**bits - 1, f"<u{bits // 8}")
            found[bits] = full
        for (bits, value), row in self._constants.items():
            found[bits][row] = value
        return found


@dataclass(frozen=True)
class Decoded:
    """What an instruction does; see `Op`."""

    plain: Execute | None = None
    control: Control | None = None
    together: bool = False
    pure: bool = False


#: Decodes the instruction at which the decoder stands.
Build = Callable[[Decoder, Instruction], Decoded]


@functools.cache
def decode(text: str) -> Program:
    """The one kernel of a PTX module.

    Raises:
        ValueError: no kernel or several, or an instruction the machine does not know.
    """
    from tests.verify_kernels.machine import access, arithmetic, exchange, warp, wgmma

    builders: dict[str, Build] = {
        **arithmetic.BUILDERS,
        **access.BUILDERS,
        **exchange.BUILDERS,
        **warp.BUILDERS,
        **wgmma.BUILDERS,
    }
    entries = parse(text)
    if len(entries) != 1:
        raise ValueError(f"the module has {len(entries)} kernels; the machine takes 1")
    entry = entries[0]
    decoder = Decoder(entry, _parameters(text, entry))
    ops = []
    for index, ins in enumerate(entry.instructions):
        decoder.index, decoder.ins = index, ins
        build = builders.get(ins.head)
        if build is None:
            raise decoder.refuse("the machine does not know this instruction")
        ops.append(decoder.op(build(decoder, ins)))
    if decoder.matrix:
        ops = [
            replace(op, matrix=(op.reads | op.writes) & decoder.matrix)
            if ins.head != "wgmma"
            else op
            for op, ins in zip(ops, entry.instructions, strict=True)
        ]
    nothing: frozenset[Register] = frozenset()
    end = Op(
        "end of the kernel", 0, None, warp.leave, False, -1, False, False, nothing,
        nothing,
    )  # fmt: skip
    block = re.search(r"\.reqntid\s+(\d+)\s*,\s*(\d+)\s*,\s*(\d+)", text)
    return Program(
        (*ops, end),
        decoder.initial(),
        decoder.special,
        decoder.parameters,
        (int(block[1]), int(block[2]), int(block[3])) if block else None,
    )


def _parameters(text: str, entry: Entry) -> dict[str, int]:
    """Bytes of every parameter, in order."""
    found = {}
    for parameter in entry.parameters:
        declared = re.search(
            rf"\.param\s([^,()]*?){re.escape(parameter.name)}\s*(?:\[(\d+)\])?\s*[,)]",
            text,
        )
        assert declared is not None
        kind = re.sub(r"\D", "", declared[1].split()[-1])
        found[parameter.name] = int(declared[2] or int(kind) // 8)
    return found
