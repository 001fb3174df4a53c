# SPDX-License-Identifier: Apache-2.0
"""The two products of attention over a tile of keys, by four warps, as inline PTX.

A tile lies in shared memory as panels of 64 columns: rows of 128 bytes, 8 KB a panel of
64 rows, its 16-byte chunks XORed with the row's number modulo 8 (wgmma's 128-byte
swizzle, which wants panels at multiples of 1 KB).

    scores   S[64 query rows, 64 keys] = Q K^T, nine panels of each
    values   O[64 query rows, 256 columns] += P V, P in registers, as a lane has the
             scores, and V the panels of K once more, read across

Warp i of the four has rows 16 i ..; of tile n of 8 columns a lane has, in sums
4 n .. 4 n + 3, rows g and g + 8 (g = lane / 4), columns 2 q and 2 q + 1 of each
(q = lane % 4), as mma.sync.m16n8k16 has them. Where the architecture has wgmma both are
chains of it, and elsewhere of mma.sync over the same columns in the same order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from verify_kernels.common import ptx
from verify_kernels.common.wgmma import has_wgmma

#: Rows, and bytes, of a panel, of which a row has 128.
PANEL_ROWS = 64
ROW_BYTES = 128
PANEL_BYTES = PANEL_ROWS * ROW_BYTES
#: Panels of a cache line: 512 latent columns and 64 more.
PANELS = 9
#: Keys of a tile.
KEYS = 64
#: Columns of the latent that one of two warpgroups has the output of.
COLUMNS = 256
_CHUNK = 16
#: Bytes of 8 rows; steps of 16 columns in a panel.
_EIGHT_ROWS = 8 * ROW_BYTES
_STEPS = 4
#: Descriptor's upper half: 128-byte swizzle, and the distance of groups of 8 rows.
_HIGH = 1 << 30 | _EIGHT_ROWS >> 4
#: Of its lower half, panel to panel, for rows that are read across.
_ACROSS = PANEL_BYTES >> 4 << 16
_SCORES = KEYS // 2
_SUMS = COLUMNS // 2


def _struct(out, count, loc, ip):
    return [
        Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip))
        for i in range(count)
    ]


def _statement(code, operands, count, sums, loc, ip, more=()):
    """A statement whose ``count`` results are $0 .., behind them its Int32 operands,
    then ``more``, of other types; ``sums`` begin in the results' registers."""
    letters = {Float32: "f", Int64: "l"}
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in operands]
    values += [v.ir_value(loc=loc, ip=ip) for v in more]
    values += [Float32(v).ir_value(loc=loc, ip=ip) for v in sums]
    constraints = ["=&f"] * count + ["r"] * len(operands)
    constraints += [letters[type(v)] for v in more]
    constraints += [str(i) for i in range(len(sums))]
    out = ptx.asm(
        llvm.StructType.get_literal([T.f32()] * count),
        values,
        "\n".join(code),
        ",".join(constraints),
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return _struct(out, count, loc, ip)


def _names(first, count, prefix="$"):
    return ",".join(f"{prefix}{first + i}" for i in range(count))


def _wgmma(count, steps, beside=()):
    """Code of a chain: for each step A's operand, behind the code that makes it, B's
    offset, and whether B is read across. The first step adds to the sums if predicate
    ``adds`` says so. B's address / 16 is operand ``count``. The code ``beside`` runs
    while the chain is under way."""
    code = ["wgmma.fence.sync.aligned;"]
    for i, (before, a, b, across) in enumerate(steps):
        tail = f"1, 1, {across};" if a.startswith("{") else f"1, 1, 0, {across};"
        code += [
            f"{before}add.s32 t, ${count}, {b}; mov.b64 b, {{t, {_HIGH}}};",
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 "
            f"{{{_names(0, count)}}}, {a}, b, {'yes' if i else 'adds'}, {tail}",
        ]
    return [
        *code,
        "wgmma.commit_group.sync.aligned;",
        *beside,
        "wgmma.wait_group.sync.aligned 0;}",
    ]


def _units(address):
    """A shared address as a descriptor has it: the CTA's rank in a cluster is above its
    18 bits."""
    return (Int32(address) & 0x3FFFF) >> 4


_REGISTERS = (
    "{.reg .pred adds, yes, live; .reg .b32 t; .reg .b64 a, b; setp.eq.b32 yes, 0, 0;"
)


def _copies(first, sources):
    """Code that asks for two rows' 16 bytes of every panel; from operand ``first`` on
    whether at all, the place, and both sizes, from ``sources`` on both addresses."""
    yield f"setp.ne.b32 live, ${first}, 0;"
    for i in range(2):
        for panel in range(PANELS):
            to = panel * PANEL_BYTES + i * (PANEL_ROWS // 2) * ROW_BYTES
            yield (
                f"@live cp.async.cg.shared.global [${first + 1}+{to}], "
                f"[${sources + i}+{panel * ROW_BYTES}], 16, ${first + 2 + i};"
            )
    yield "cp.async.commit_group;"


@dsl_user_op
def _scores_async(query, keys, copies, *, loc=None, ip=None):
    live, place, sources, sizes = copies
    steps = []
    for s in range(_STEPS * PANELS):
        at = PANEL_BYTES * (s // _STEPS) + 2 * _CHUNK * (s % _STEPS) >> 4
        make = f"add.s32 t, ${_SCORES + 1}, {at}; mov.b64 a, {{t, {_HIGH}}}; "
        steps.append((make, "a", at, 0))
    operands = (_units(keys), _units(query), live, place, *sizes)
    beside = _copies(_SCORES + 2, _SCORES + len(operands))
    code = [_REGISTERS, "setp.ne.b32 adds, 0, 0;", *_wgmma(_SCORES, steps, beside)]
    return _statement(code, operands, _SCORES, (), loc, ip, sources)


@dsl_user_op
def _copy(copies, *, loc=None, ip=None):
    live, place, sources, sizes = copies
    code = ["{.reg .pred live;", *_copies(0, 4), "}"]
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (live, place, *sizes)]
    operands += [v.ir_value(loc=loc, ip=ip) for v in sources]
    ptx.asm(
        None,
        operands,
        "\n".join(code),
        "r,r,r,r,l,l",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


def _shrink(factors):
    """Multiplies a lane's sums, of two rows; ``factors`` are operands."""
    return [f"mul.f32 ${n}, ${n}, ${factors + n // 2 % 2};" for n in range(_SUMS)]


@dsl_user_op
def _values_async(weights, values, sums, factors, adds, *, loc=None, ip=None):
    steps = []
    for s in range(_STEPS):
        words = f"{{{_names(_SUMS + 2 + 4 * s, 4)}}}"
        at = (2 * _EIGHT_ROWS * s >> 4) + _ACROSS
        steps.append(("", words, at, 1))
    operands = (_units(values), adds, *weights)
    code = [
        _REGISTERS,
        f"setp.ne.b32 adds, ${_SUMS + 1}, 0;",
        *_shrink(_SUMS + len(operands)),
        *_wgmma(_SUMS, steps),
    ]
    return _statement(code, operands, _SUMS, sums, loc, ip, factors)


def _mma(d, a, b):
    names = _names(d, 4)
    return (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        f"{{{names}}}, {{{a}}}, {{{b}}}, {{{names}}};"
    )


def _matrices(names, address, step, offset, across=""):
    """ldmatrix at the lane's row and the chunks of a step of 16 columns."""
    return (
        f"xor.b32 t, {address}, {2 * _CHUNK * step}; "
        f"ldmatrix.sync.aligned.m8n8.x4{across}.shared.b16 {{{names}}}, [t+{offset}];"
    )


_HEAD = "{.reg .b32 t, a<4>, b<4>;"
_A = "a0,a1,a2,a3"
_B = "b0,b1,b2,b3"


@dsl_user_op
def _scores_of_panel(query, keys, sums, *, loc=None, ip=None):
    """``query`` and ``keys``: this lane's rows (`_row`)."""
    code = [_HEAD]
    for s in range(_STEPS):
        code.append(_matrices(_A, f"${_SCORES}", s, 0))
        for n in range(0, KEYS // 8, 2):
            code.append(_matrices(_B, f"${_SCORES + 1}", s, _EIGHT_ROWS * n))
            code += [_mma(4 * n, _A, "b0,b1"), _mma(4 * n + 4, _A, "b2,b3")]
    code.append("}")
    return _statement(code, (query, keys), _SCORES, sums, loc, ip)


@cute.jit
def _scores_sync(query, keys):
    """A loop: ptxas would ask for panels ahead until registers spill."""
    sums = [Float32(0.0)] * _SCORES
    for panel in cutlass.range(PANELS, unroll=1):
        at = panel * PANEL_BYTES
        sums = _scores_of_panel(query + at, keys + at, sums)
    return sums


@dsl_user_op
def _values_sync(weights, values, sums, factors, adds, *, loc=None, ip=None):
    after = _SUMS + 2 + len(weights)
    code = [
        "{.reg .pred fresh; .reg .b32 t, b<4>;",
        f"setp.eq.b32 fresh, ${_SUMS + 1}, 0;",
        *_shrink(after),
        *(f"@fresh mov.f32 ${n}, 0f00000000;" for n in range(_SUMS)),
    ]
    for s in range(_STEPS):
        a = _names(_SUMS + 2 + 4 * s, 4)
        for n in range(0, COLUMNS // 8, 2):
            panel, tile = divmod(n, PANEL_ROWS // 8)
            at = PANEL_BYTES * panel + 2 * _EIGHT_ROWS * s
            code.append(_matrices(_B, f"${_SUMS}", tile // 2, at, ".trans"))
            code += [_mma(4 * n, a, "b0,b1"), _mma(4 * n + 4, a, "b2,b3")]
    code.append("}")
    operands = (values, adds, *weights)
    return _statement(code, operands, _SUMS, sums, loc, ip, factors)


def _row(address, lane, row_bit, chunk_bit):
    """Where ldmatrix finds this lane's row in a panel's first two chunks: bit
    ``row_bit`` of the lane is the upper eight rows, ``chunk_bit`` the second chunk.
    XORed with 32 i it is that of chunks 2 i and 2 i + 1."""
    row = (lane & 7) + (lane >> row_bit & 1) * 8
    chunk = lane >> chunk_bit & 1
    return address + row * ROW_BYTES + (chunk ^ (lane & 7)) * _CHUNK


def scores(query, keys, copies, warp, lane):
    """A lane's 32 scores, four for each tile of 8 keys; and copies of two rows, one
    group, that are asked for meanwhile.

    The copies of a tile take as long to ask for as half of the scores to multiply: 18
    each of all threads (measured: 3.1 us a block with them in front, H200, 2026-12-01).

    Args:
        query: shared address of the query tile.
        keys: of the keys'.
        copies: of this lane: an Int32, 0 if there are none; a place in the first panel,
            32 rows behind which the second row goes; two Int64 addresses; two sizes, 16
            or 0 for zeros.
        warp: this thread's among its four.
        lane: this thread's.
    """
    if has_wgmma():
        return _scores_async(query, keys, copies)
    _copy(copies)
    mine = query + warp * (16 * ROW_BYTES)
    return _scores_sync(_row(mine, lane, 3, 4), _row(keys, lane, 4, 3))


def copy(copies):
    """The copies of `scores` alone."""
    _copy(copies)


def values(weights, keys, sums, factors, adds, lane):
    """``sums``, 128 a lane, times their row's factor, plus the weights' product with
    `COLUMNS` columns.

    One statement: the tensor cores want the sums in 128 registers next to each other,
    and what else touches them costs copies.

    Args:
        weights: where a lane has scores the weights, two bf16 an Int32.
        keys: shared address of the first of four panels.
        sums: Float32, a lane's.
        factors: of its two rows.
        adds: an Int32, 0 to begin at zero whatever the sums are.
        lane: this thread's.
    """
    if has_wgmma():
        return _values_async(weights, keys, sums, factors, adds)
    return _values_sync(weights, _row(keys, lane, 3, 4), sums, factors, adds)
