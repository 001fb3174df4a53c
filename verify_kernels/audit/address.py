# SPDX-License-Identifier: Apache-2.0
"""Which bytes of shared memory a load can touch, from machine code.

Intervals are carried forward from the kernel's start over all paths; a value that two
paths leave different is unknown. So a result holds for every execution, provided that
the arithmetic on the way to an address does not overflow 32 bits.

Known are the few integer instructions that addresses are made of, written from the PTX
they were compiled from; every other one makes its result unknown. The address of a
CTA's shared memory is SR_CgaCtaId << 24, its dynamic part begins 1024 bytes in. Thread
indices are below 1024, and a compare with a constant narrows its operand on both sides
of a branch, so a warp role knows its warps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from verify_kernels.audit.sass import Code, Instruction

#: First byte and the one after the last, from the start of dynamic shared memory.
Region = tuple[int, int]

_DYNAMIC = 0x400
_MAX_THREADS = 1024
_REGISTER = re.compile(r"U?R(?:\d+|Z)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_PREDICATE = re.compile(r"!?U?P[0-9T]")
_AND, _OR = "0xc0", "0xfc"
#: Instructions whose one result takes one register, but for a 64 or 128 in their name.
_SINGLE = re.compile(
    r"U?(?:MOV|IMAD|IADD3?|IADD|LEA|SHF|LOP3|SEL|PRMT|IABS|FADD|FMUL|FFMA|FSEL|I2F|F2I|"
    r"F2FP|POPC|FLO|BREV)|VI\w+|S2U?R|R2UR|U?LDCU?|MUFU|FMNMX|SHFL|C?REDUX|VOTEU?|"
    r"ELECT|LDS|LDG|LD"
)


class Value(NamedTuple):
    """An interval, both ends included: of numbers, of offsets in the CTA's shared
    memory, or of the CTA's rank in its cluster."""

    kind: Literal["number", "shared", "rank"]
    low: int
    high: int


class Test(NamedTuple):
    """What a predicate says: ``register compare constant``."""

    register: str
    compare: str
    constant: int


_ANY = Value("number", -(2**31), 2**31 - 1)
#: What is known of registers and predicates, by name.
_State = dict[str, Value | Test]
_OPPOSITE = {"LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE", "EQ": "NE", "NE": "EQ"}


def shared_addresses(code: Code) -> dict[int, Region]:
    """Bytes that a load from shared memory touches, for each whose bytes are known."""
    found = {}
    for index, state in _states(code).items():
        ins = code.instructions[index]
        if ins.head == "LDS" and ins.operands[1:]:
            address = _address(state, ins.operands[1])
            if address.kind == "shared":
                size = next((n for n in (128, 64) if f".{n}" in ins.opcode), 32) // 8
                low, high = address.low - _DYNAMIC, address.high - _DYNAMIC
                found[index] = (low, high + size)
    return found


def _states(code: Code) -> dict[int, _State]:
    """What is known before each instruction."""
    before: dict[int, _State] = {0: {}}
    todo = [0]
    while todo:
        index = todo.pop()
        ins = code.instructions[index]
        after = _after(before[index], ins)
        for following in code.successors(index):
            new = after
            if code.taken[index] and following != index + 1:
                new = _narrowed(after, ins, True)
            elif code.taken[index] and following not in code.taken[index]:
                new = _narrowed(after, ins, False)
            known = before.get(following)
            if known is not None:
                new = {k: v for k, v in known.items() if new.get(k) == v}
            if new != known:
                before[following] = new
                todo.append(following)
    return before


def _after(state: _State, ins: Instruction) -> _State:
    written = _written(ins)
    result = _result(state, ins)
    if ins.guard and isinstance(result, Value):
        old = state.get(written[0], _ANY)
        result = _hull(old, result) if isinstance(old, Value) else _ANY
    lost = {f"P{p}" for p in ()} | set(written) | set(_predicates_written(ins))
    state = {
        k: v
        for k, v in state.items()
        if k not in lost and not (isinstance(v, Test) and v.register in lost)
    }
    if isinstance(result, Test) and not ins.guard:
        state[ins.operands[0]] = result
    elif isinstance(result, Value) and result != _ANY:
        state[written[0]] = result
    return state


def _written(ins: Instruction) -> list[str]:
    """Registers that an instruction may write; too many rather than too few."""
    if "SETP" in ins.head or ins.head == "PLOP3":
        return []
    plain = ins.operands
    while plain and _PREDICATE.fullmatch(plain[0]):
        plain = plain[1:]
    if not plain or not _REGISTER.fullmatch(plain[0]) or plain[0].endswith("Z"):
        return []
    results = plain[:2] if ".256" in ins.opcode else plain[:1]
    if ".256" in ins.opcode:
        count = 8
    elif "128" in ins.opcode:
        count = 4
    elif _SINGLE.fullmatch(ins.head):
        count = 2 if "64" in ins.opcode or "WIDE" in ins.opcode else 1
    else:
        count = 4
    names = [_REGISTER.fullmatch(r) and r.rpartition("R") for r in results]
    return [
        f"{n[0]}R{int(n[2]) + i}"
        for n in names
        if n and n[2] != "Z"
        for i in range(count)
    ]


def _predicates_written(ins: Instruction) -> list[str]:
    return [p.lstrip("!") for p in ins.operands if _PREDICATE.fullmatch(p)]
