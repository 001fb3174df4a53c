# SPDX-License-Identifier: Apache-2.0
"""Instructions on registers, each lane for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.verify_kernels.machine.memory import Array
from tests.verify_kernels.machine.ptx import (
    BITS,
    Build,
    Decoded,
    Decoder,
    Lanes,
)
from verify_kernels.audit.ptx import Instruction

Function = Callable[..., Any]


def put(row: Array, values: Any, lanes: Lanes) -> None:
    """Write the lanes that run."""
    if lanes is None:
        row[:] = values
    else:
        np.copyto(row, values, where=lanes, casting="unsafe")


def bf16(values: Array) -> Array:
    """fp32 to the bits of bf16, to nearest even; NaN to the one NaN that PTX gives."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint32)


def _left(a: Array, b: Array) -> Array:
    bits = a.itemsize * 8
    count = np.minimum(b, bits - 1).astype(a.dtype)
    return np.where(b < bits, a << count, 0)


def _right(a: Array, b: Array) -> Array:
    """Past the width nothing is left, but for the sign."""
    bits = a.itemsize * 8
    shifted = a >> np.minimum(b, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(b < bits, shifted, 0)


def _divide(a: Array, b: Array) -> Array:
    """To zero; what a division by 0 gives is not fixed."""
    wide, by = a.astype(np.int64), b.astype(np.int64)
    size = np.abs(wide) // np.maximum(np.abs(by), 1)
    return np.where((wide < 0) != (by < 0), -size, size)


def _remainder(a: Array, b: Array) -> Array:
    """With the sign of ``a``."""
    return a.astype(np.int64) - _divide(a, b) * b.astype(np.int64)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in fp64; the sum is rounded twice, to fp64 and to fp32."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _flush(a: Array) -> Array:
    """Subnormals to zero."""
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(0, a), a)


def _approximate(function: Function) -> Function:
    """The exact value, rounded, where the hardware's is a few ulps off."""

    def run(a: Array) -> Array:
        value = function(_flush(a).astype(np.float64)).astype(np.float32)
        return _flush(value)

    return run


def _smaller(a: Array, b: Array) -> Array:
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def _larger(a: Array, b: Array) -> Array:
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _ones(a: Array) -> Array:
    """Bits that are set."""
    return np.unpackbits(a.view(np.uint8)).reshape(len(a), -1).sum(1, dtype=a.dtype)


def _high_half(a: Array, b: Array) -> Array:
    """Bits 64 and above of the product of unsigned 64-bit numbers."""
    assert a.dtype == np.uint64
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    cross = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    other = (a & low) * (b >> half) + (cross & low)
    return (a >> half) * (b >> half) + (cross >> half) + (other >> half)


#: Operands and result have the type at the end of the opcode.
SAME_TYPE: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "mul.hi": _high_half,
    "mad.lo": lambda a, b, c: a * b + c,
    "fma.rn": _fma,
    "div": _divide,
    "rem": _remainder,
    "div.rn": np.divide,
    "div.full": np.divide,
    "min": _smaller,
    "max": _larger,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "popc": _ones,
    "ex2.approx.ftz": _approximate(np.exp2),
    "lg2.approx.ftz": _approximate(np.log2),
    "rcp.rn": lambda a: np.float32(1) / a,
    "rcp.approx.ftz": _approximate(lambda a: 1 / a),
    "rsqrt.approx.ftz": _approximate(lambda a: 1 / np.sqrt(a)),
}
COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neu": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
#: (to, from); integers to integers need no entry.
CONVERT: dict[tuple[str, str], Function] = {
    ("bf16", "f32"): bf16,
    ("f32", "bf16"): lambda a: (a.astype(np.uint32) << 16).view(np.float32),
    ("f32", "s32"): lambda a: a.astype(np.float32),
    ("f32", "u32"): lambda a: a.astype(np.float32),
}
_INTEGERS = {f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64)}


def _apply(
    function: Function, out: tuple[str, int], *sources: tuple[str, int]
) -> Decoded:
    """``out = function(sources)``, each a (type, row)."""
    kind, row = out
    if len(sources) == 2:
        (one, first), (other, second) = sources

        def both(warp: Any, lanes: Lanes) -> None:
            rows = warp.rows
            values = function(rows[one][first], rows[other][second])
            put(rows[kind][row], values, lanes)

        return Decoded(both, pure=True)

    def run(warp: Any, lanes: Lanes) -> None:
        rows = warp.rows
        put(rows[kind][row], function(*(rows[k][r] for k, r in sources)), lanes)

    return Decoded(run, pure=True)


def _elementwise(decoder: Decoder, ins: Instruction) -> Decoded:
    name, _, kind = ins.opcode.rpartition(".")
    if name not in SAME_TYPE:
        raise decoder.refuse("the machine does not know this instruction")
    out, *sources = [(kind, decoder.row(o, kind)) for o in ins.operands]
    return _apply(SAME_TYPE[name], out, *sources)


def _shift(decoder: Decoder, ins: Instruction) -> Decoded:
    kind = ins.opcode.rpartition(".")[2]
    out, value = [(kind, decoder.row(o, kind)) for o in ins.operands[:2]]
    by = ("u32", decoder.row(ins.operands[2], "u32"))
    return _apply(_left if ins.head == "shl" else _right, out, value, by)


def _product_of_pairs(a: Array, b: Array) -> Array:
    """Of bf16 in both halves."""

    def half(word: Array) -> Array:
        return (word & np.uint32(0xFFFF0000)).view(np.float32)

    with np.errstate(invalid="ignore", over="ignore"):
        high = bf16(half(a) * half(b))
        low = bf16(half(a << np.uint32(16)) * half(b << np.uint32(16)))
    return high << np.uint32(16) | low


def _multiply(decoder: Decoder, ins: Instruction) -> Decoded:
    """mul and mad; with .wide or .hi through a type of twice the bits."""
    _, *form, kind = ins.opcode.split(".")
    if kind == "bf16x2" and form == ["rn"]:
        out, *pair = [("b32", decoder.row(o, "b32")) for o in ins.operands]
        return _apply(_product_of_pairs, out, *pair)
    if form not in (["wide"], ["hi"]) or BITS.get(kind) != 32:
        return _elementwise(decoder, ins)
    double = f"{kind[0]}64"
    wide = np.int64 if kind[0] == "s" else np.uint64
    a, b = [(kind, decoder.row(o, kind)) for o in ins.operands[1:3]]
    if form == ["hi"]:
        out = (kind, decoder.row(ins.operands[0], kind))
        return _apply(lambda x, y: x.astype(wide) * y >> wide(32), out, a, b)
    out = (double, decoder.row(ins.operands[0], double))
    if ins.head == "mul":
        return _apply(lambda x, y: x.astype(wide) * y, out, a, b)
    c = (double, decoder.row(ins.operands[3], double))
    return _apply(lambda x, y, z: x.astype(wide) * y + z, out, a, b, c)


def _compare(decoder: Decoder, ins: Instruction) -> Decoded:
    _, how, kind = ins.opcode.split(".")
    if how not in COMPARE:
        raise decoder.refuse(f"the machine does not know the comparison {how}")
    a, b = [(kind, decoder.row(o, kind)) for o in ins.operands[1:]]
    out = ("pred", decoder.row(ins.operands[0], "pred"))
    if (how, kind) == ("ne", "f32"):  # false for NaN, other than in numpy
        return _apply(lambda x, y: (x < y) | (x > y), out, a, b)
    return _apply(COMPARE[how], out, a, b)


def _select(decoder: Decoder, ins: Instruction) -> Decoded:
    kind = ins.opcode.rpartition(".")[2]
    out, a, b = [(kind, decoder.row(o, kind)) for o in ins.operands[:3]]
    which = ("pred", decoder.row(ins.operands[3], "pred"))
    return _apply(np.where, out, which, a, b)


def _funnel(decoder: Decoder, ins: Instruction) -> Decoded:
    """shf: the upper word of two, shifted left together."""
    if ins.opcode != "shf.l.wrap.b32":
        raise decoder.refuse("the machine takes shf.l.wrap.b32 only")
    out, low, high, count = [("u32", decoder.row(o, "u32")) for o in ins.operands]

    def shift(a: Array, b: Array, n: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        by = (n & np.uint32(31)).astype(np.uint64)
        return (both << by >> np.uint64(32)).astype(np.uint32)

    return _apply(shift, out, low, high, count)


def _permute(decoder: Decoder, ins: Instruction) -> Decoded:
    """prmt: of eight bytes those that the digits of a constant choose; a digit of 8 and
    more gives eight times the sign of a byte."""
    if ins.opcode != "prmt.b32" or not ins.operands[3].lstrip("0x").isalnum():
        raise decoder.refuse("the machine takes prmt.b32 with a constant only")
    chosen = int(ins.operands[3], 0)
    out, a, b = [("u32", decoder.row(o, "u32")) for o in ins.operands[:3]]

    def choose(a: Array, b: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        found = np.zeros_like(both)
        for i in range(4):
            digit = chosen >> 4 * i & 15
            byte = both >> np.uint64(8 * (digit & 7)) & np.uint64(0xFF)
            if digit & 8:
                byte = (byte >> np.uint64(7)) * np.uint64(0xFF)
            found |= byte << np.uint64(8 * i)
        return found.astype(np.uint32)

    return _apply(choose, out, a, b)


def _convert(decoder: Decoder, ins: Instruction) -> Decoded:
    _, *_, to, source = ins.opcode.split(".")
    sources = [(source, decoder.row(o, source)) for o in ins.operands[1:]]
    out = (to, decoder.row(ins.operands[0], to))
    if to == "bf16x2" and source == "f32":
        return _apply(lambda a, b: bf16(a) << 16 | bf16(b), out, *sources)
    if {to, source} <= _INTEGERS:
        kind = np.dtype(f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}")
        return _apply(lambda a: a.astype(kind), out, *sources)
    if (to, source) not in CONVERT:
        raise decoder.refuse("the machine does not know this conversion")
    return _apply(CONVERT[to, source], out, *sources)


def _move(decoder: Decoder, ins: Instruction) -> Decoded:
    """A copy, or ``{low, high} = a``, one of which may be ``_``, and ``a = {low,
    high}``."""
    kind = ins.opcode.rpartition(".")[2]
    target, source = ins.operands
    if "{" not in ins.text:
        to, of = (kind, decoder.row(target, kind)), (kind, decoder.row(source, kind))
        return _apply(lambda a: a, to, of)
    half = f"b{BITS[kind] // 2}"
    parted = target if target.startswith("{") else source
    names = parted.strip("{}").replace(" ", "").split(",")
    taken = [i for i, name in enumerate(names) if name != "_"]
    halves = [decoder.row(names[i], half) for i in taken]
    whole = decoder.row(source if target.startswith("{") else target, kind)

    def take(warp: Any, lanes: Lanes) -> None:
        rows = warp.rows
        parts = rows[kind][whole].view(rows[half][halves[0]].dtype).reshape(-1, 2)
        for row, values in zip(halves, parts.T[taken], strict=True):
            put(rows[half][row], values, lanes)

    def give(warp: Any, lanes: Lanes) -> None:
        rows = warp.rows
        parts = np.stack([rows[half][row] for row in halves], 1)
        put(rows[kind][whole], parts.view(rows[kind][whole].dtype)[:, 0], lanes)

    return Decoded(take if target.startswith("{") else give, pure=True)


BUILDERS: dict[str, Build] = {
    **dict.fromkeys(
        (
            "add",
            "sub",
            "fma",
            "div",
            "rem",
            "min",
            "max",
            "and",
            "or",
            "xor",
            "not",
            "neg",
        ),
        _elementwise,
    ),
    **dict.fromkeys(("abs", "popc", "ex2", "lg2", "rcp", "rsqrt"), _elementwise),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("mul", "mad"), _multiply),
    "setp": _compare,
    "selp": _select,
    "prmt": _permute,
    "shf": _funnel,
    "cvt": _convert,
    "mov": _move,
}
