# SPDX-License-Identifier: Apache-2.0
"""Which bytes of shared memory a load can touch, from machine code.

Intervals are carried forward from the kernel's start over all paths; what grows from
round to round of a loop is unknown. So a result holds for every execution, provided
that the arithmetic on the way to an address does not overflow 32 bits.

Known are the few integer instructions that addresses are made of, written from the PTX
they were compiled from; every other one makes its result unknown. The address of a
CTA's shared memory is SR_CgaCtaId << 24, its dynamic part begins 1024 bytes in. Thread
indices are below 1024, and a compare with a constant narrows its operand on both sides
of a branch, so a warp role knows its warps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from verify_kernels.audit.sass import Code, Instruction

#: First byte and the one after the last, from the start of dynamic shared memory.
Region = tuple[int, int]

_DYNAMIC = 0x400
_MAX_THREADS = 1024
_REGISTER = re.compile(r"(U?R)(\d+|Z)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_PREDICATE = re.compile(r"!?U?P[0-9T]")
#: Instructions whose one result takes one register, but for a 64 or 128 in their name.
_SINGLE = re.compile(
    r"U?(?:MOV|IMAD|IADD3?|LEA|SHF|LOP3|SEL|PRMT|IABS|FADD|FMUL|FFMA|FSEL|I2F|F2I|"
    r"F2FP|POPC|FLO|BREV)|VI\w+|S2U?R|R2UR|U?LDCU?|MUFU|FMNMX|SHFL|C?REDUX|VOTEU?|"
    r"ELECT|LDS|LDG|LD"
)
_MULTIPLY_ADD = frozenset(
    "IMAD" + kind
    for kind in ("", ".MOV", ".MOV.U32", ".U32", ".SHL", ".SHL.U32", ".IADD")
)
#: ldmatrix: 16 bytes at the address of every lane.
_MATRICES = re.compile(r"LDSM\.16\.MT?88\.[24]")
_TRUE = ("PT", "UPT")
_EXTREMES = {"PT": min, "UPT": min, "!PT": max, "!UPT": max}
#: How often an interval may grow where paths meet before it is given up.
_PATIENCE = 4
_OPPOSITE = {"LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE", "EQ": "NE", "NE": "EQ"}


class Value(NamedTuple):
    """An interval, both ends included: of numbers, of addresses less that of the CTA's
    shared memory, or of the CTA's rank in its cluster."""

    kind: Literal["number", "shared", "rank"]
    low: int
    high: int


class Test(NamedTuple):
    """What a predicate says: ``register compare constant``."""

    register: str
    compare: str
    constant: int


#: What is known of registers and predicates, by name.
_State = dict[str, Value | Test]
_ANY = Value("number", -(2**31), 2**31 - 1)


def shared_addresses(code: Code) -> dict[int, Region]:
    """Bytes that a load from shared memory touches, for each whose bytes are known."""
    found = {}
    for index, state in _states(code).items():
        ins = code.instructions[index]
        matrices = _MATRICES.fullmatch(ins.opcode)
        if ins.head == "LDS" or matrices:
            address = _address(state, ins.operands[1])
            if address.kind == "shared":
                wide = next((n for n in (128, 64) if f".{n}" in ins.opcode), 32)
                size = 16 if matrices else wide // 8
                found[index] = (
                    address.low - _DYNAMIC,
                    address.high - _DYNAMIC + size,
                )
    return found


def _states(code: Code) -> dict[int, _State]:
    """What is known before each instruction."""
    before: dict[int, _State] = {0: {}}
    changes = [0] * len(code.instructions)
    todo = [0]
    while todo:
        index = heappop(todo)
        ins, state = code.instructions[index], before[index]
        successors = code.successors(index)
        for following in successors:
            if ins.head == "BRA" and len(set(successors)) == 2:
                new = _narrowed(state, ins, following != index + 1)
            else:
                new = _after(state, ins)
            known = before.get(following)
            if known is not None:
                new = _join(known, new, changes[following] < _PATIENCE)
            if new != known:
                changes[following] += 1
                before[following] = new
                heappush(todo, following)
    return before


def _join(one: _State, other: _State, widen: bool) -> _State:
    """What is known where two paths meet; a loop's counter ends up unknown."""
    joined = {}
    for name, value in one.items():
        met = other.get(name)
        if value == met:
            joined[name] = value
        elif widen and isinstance(value, Value) and isinstance(met, Value):
            joined[name] = _hull(value, met)
    return joined


def _after(state: _State, ins: Instruction) -> _State:
    written = _written(ins)
    lost = {*written, *(p.lstrip("!") for p in _predicates(ins))}
    result = _test(state, ins) or _value(state, ins)
    kept = {
        name: known
        for name, known in state.items()
        if name not in lost and not (isinstance(known, Test) and known.register in lost)
    }
    if isinstance(result, Test):
        if not ins.guard:
            kept[ins.operands[0]] = result
    elif result is not None and len(written) == 1:
        if ins.guard:
            result = _hull(_register(state, written[0]), result)
        if result != _ANY:
            kept[written[0]] = result
    return kept


def _narrowed(state: _State, branch: Instruction, taken: bool) -> _State:
    """What is known on one side of a branch."""
    conditions = [*([branch.guard] if branch.guard else []), *branch.operands[:-1]]
    named = conditions[0]
    test = state.get(named.lstrip("!"))
    alone = len(conditions) == 1 and branch.opcode in ("BRA", "BRA.U")
    if not alone or not isinstance(test, Test):
        return state
    holds = taken != named.startswith("!")
    compare = test.compare if holds else _OPPOSITE[test.compare]
    value, c = _register(state, test.register), test.constant
    low = {"GT": c + 1, "GE": c, "EQ": c}.get(compare, value.low)
    high = {"LT": c - 1, "LE": c, "EQ": c}.get(compare, value.high)
    low, high = max(low, value.low), min(high, value.high)
    if value.kind != "number" or low > high:
        return state
    return state | {test.register: Value("number", low, high)}


def _predicates(ins: Instruction) -> list[str]:
    return [p for p in ins.operands if _PREDICATE.fullmatch(p)]


def _plain(ins: Instruction) -> list[str]:
    return [p for p in ins.operands if not _PREDICATE.fullmatch(p)]


def _written(ins: Instruction) -> list[str]:
    """Registers that an instruction may write; too many rather than too few."""
    plain = _plain(ins)
    if "SETP" in ins.head or ins.head == "PLOP3" or not plain:
        return []
    if ins.head == "LDTM":
        count, results = 255, plain[:1]
    elif "GMMA" in ins.opcode:
        # 64 rows by 128 threads, of 32 bits each or of 16.
        columns = re.search(r"\.64x(\d+)x", ins.opcode)
        count, results = int(columns[1]) // 2 if columns else 255, plain[:1]
    elif ".256" in ins.opcode:
        count, results = 8, plain[:2]
    elif "128" in ins.opcode or not _SINGLE.fullmatch(ins.head):
        count, results = 4, plain[:1]
    else:
        count, results = 1 + ("64" in ins.opcode or "WIDE" in ins.opcode), plain[:1]
    return [
        f"{match[1]}{int(match[2]) + i}"
        for match in map(_REGISTER.fullmatch, results)
        if match and match[2] != "Z"
        for i in range(count)
    ]


def _test(state: _State, ins: Instruction) -> Test | None:
    """The meaning of a predicate that is set from one compare, or copied."""
    ops = ins.operands
    if ins.head == "PLOP3":
        sources = [p for p in ops[2:5] if p not in _TRUE]
        copied = state.get(sources[0]) if len(sources) == 1 else None
        # Truth table 0x80 is the conjunction of the three sources.
        alone = ops[1] in _TRUE and ops[5:6] == ("0x80",)
        return copied if isinstance(copied, Test) and alone else None
    kind = re.fullmatch(r"U?ISETP\.([GLEN][TEQ])(\.U32)?\.AND", ins.opcode)
    if not kind or len(ops) != 5 or ops[1] not in _TRUE or ops[4] not in _TRUE:
        return None
    value, bound = _operand(state, ops[2]), _operand(state, ops[3])
    if not _REGISTER.fullmatch(ops[2]) or bound.low != bound.high:
        return None
    if kind[2] and min(value.low, bound.low) < 0:
        return None
    return Test(ops[2], kind[1], bound.low)


def _value(state: _State, ins: Instruction) -> Value | None:
    """The result of an instruction; None if it is not one of those known."""
    plain = _plain(ins)
    name = ins.opcode.removeprefix("U")
    if name in ("S2R", "S2UR"):
        return _SPECIAL.get(plain[1])
    a, b, c, *_ = [*(_operand(state, p) for p in plain[1:]), _ZERO, _ZERO, _ZERO]
    extreme = _EXTREMES.get(ins.operands[-1] if ins.operands else "")
    if name in ("MOV", "R2UR"):
        return a
    if name in ("IADD3", "IADD", "VIADD"):
        return _sum(_sum(a, b), c)
    if name in _MULTIPLY_ADD:
        return _sum(_product(a, b), c)
    if name == "SEL":
        return _hull(a, b)
    if name == "VIMNMX" and extreme:
        return _extreme(a, b, extreme)
    if name == "VIADDMNMX" and extreme:
        return _extreme(_sum(a, b), c, extreme)
    if name == "LEA" and len(plain) == 4 and 0 <= c.low == c.high:
        if a.kind == "rank":
            return b._replace(kind="shared") if c.low == 24 else _ANY
        return _sum(_product(a, _number(1 << c.low)), b)
    if name == "SHF.L.U32" and 0 <= b.low == b.high:
        return _product(a, _number(1 << b.low))
    if name in ("SHF.R.U32.HI", "SHF.R.S32.HI") and plain[1] in ("RZ", "URZ"):
        return _shifted(c, b, name == "SHF.R.S32.HI")
    if name == "LOP3.LUT" and len(plain) == 5 and plain[3] in ("RZ", "URZ"):
        return _bits(a, b, plain[4])
    return None


_SPECIAL = {
    "SR_TID.X": Value("number", 0, _MAX_THREADS - 1),
    "SR_LANEID": Value("number", 0, 31),
    "SR_CgaCtaId": Value("rank", 0, 15),
}


def _number(value: int) -> Value:
    return Value("number", value, value)


_ZERO = _number(0)


def _register(state: _State, name: str) -> Value:
    value = state.get(name)
    return value if isinstance(value, Value) else _ANY


def _operand(state: _State, text: str) -> Value:
    if _NUMBER.fullmatch(text):
        number = int(text, 16)
        return _number(number - 2**32 if number >= 2**31 else number)
    if text.startswith("-"):
        return _product(_operand(state, text[1:]), _number(-1))
    match = _REGISTER.fullmatch(text)
    if match is None:
        return _ANY
    return _ZERO if match[2] == "Z" else _register(state, text)


def _address(state: _State, text: str) -> Value:
    """The sum in the brackets of a memory operand."""
    total = _ZERO
    for part in text.strip("[]").split("+"):
        total = _sum(total, _operand(state, part))
    return total


def _sum(a: Value, b: Value) -> Value:
    kinds = {a.kind, b.kind} - {"number"}
    if "rank" in kinds or a.kind == b.kind == "shared":
        return _ANY
    kind: Literal["number", "shared"] = "shared" if kinds else "number"
    return Value(kind, a.low + b.low, a.high + b.high)


def _product(a: Value, b: Value) -> Value:
    if b == _number(1):
        return a
    if a.kind != "number" or b.kind != "number":
        return _ANY
    ends = [x * y for x in a[1:] for y in b[1:]]
    return Value("number", min(ends), max(ends))


def _hull(a: Value, b: Value) -> Value:
    if a.kind != b.kind:
        return _ANY
    return Value(a.kind, min(a.low, b.low), max(a.high, b.high))


def _extreme(a: Value, b: Value, pick: Callable[[int, int], int]) -> Value:
    if a.kind != "number" or b.kind != "number":
        return _ANY
    return Value("number", pick(a.low, b.low), pick(a.high, b.high))


def _shifted(a: Value, by: Value, signed: bool) -> Value:
    if a.kind != "number" or not 0 <= by.low == by.high:
        return _ANY
    if a.low < 0 and not signed:
        return _ANY
    return Value("number", a.low >> by.low, a.high >> by.low)


def _bits(a: Value, b: Value, table: str) -> Value:
    """Bitwise and, or."""
    if a.kind != "number" or b.kind != "number":
        return _ANY
    highs = [v.high for v in (a, b) if v.low >= 0]
    if table == "0xc0" and highs:
        return Value("number", 0, min(highs))
    if table == "0xfc" and len(highs) == 2:
        bits = max(highs).bit_length()
        return Value("number", max(a.low, b.low), (1 << bits) - 1)
    return _ANY
