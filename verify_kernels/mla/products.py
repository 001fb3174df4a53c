# SPDX-License-Identifier: Apache-2.0
"""The two products of attention over a tile of keys, by four warps, as inline PTX.

A tile lies in shared memory as panels of 64 columns: rows of 128 bytes, 8 KB a panel of
64 rows, its 16-byte chunks XORed with the row's number modulo 8 (wgmma's 128-byte
swizzle, which wants panels at multiples of 1 KB).

    scores   S[64 query rows, 32 keys] = Q K^T, nine panels of each
    values   O[64 query rows, 256 columns] += P V, P one panel of 64 keys, and V the
             panels of K once more, read across

Warp i of the four has rows 16 i ..; of tile n of 8 columns a lane has, in sums
4 n .. 4 n + 3, rows g and g + 8 (g = lane / 4), columns 2 q and 2 q + 1 of each
(q = lane % 4), as mma.sync.m16n8k16 has them. Where the architecture has wgmma both are
chains of it, and elsewhere of mma.sync over the same columns in the same order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
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
#: Keys of which one of the two warpgroups has the scores.
KEYS = 32
#: Columns of the latent that one of them has the output of.
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


def _statement(code, operands, count, sums, loc, ip):
    """A statement whose ``count`` results are $0 .., and its Int32 operands behind
    them; ``sums`` begin in the results' registers."""
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in operands]
    values += [Float32(v).ir_value(loc=loc, ip=ip) for v in sums]
    constraints = ["=&f"] * count + ["r"] * len(operands)
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


def _wgmma(count, steps):
    """Code of a chain: ``steps`` are offsets for A's and B's descriptor, whether to
    add, and whether B is read across; its operands are A's and B's address / 16."""
    code = [
        "{.reg .pred no, yes; .reg .b32 t; .reg .b64 a, b;",
        "setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for a, b, adds, across in steps:
        code += [
            f"add.s32 t, ${count}, {a}; mov.b64 a, {{t, {_HIGH}}};",
            f"add.s32 t, ${count + 1}, {b}; mov.b64 b, {{t, {_HIGH}}};",
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 "
            f"{{{_names(0, count)}}}, a, b, {'yes' if adds else 'no'}, 1, 1, 0, "
            f"{across};",
        ]
    return [
        *code,
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;}",
    ]


def _units(address):
    """A shared address as a descriptor has it: the CTA's rank in a cluster is above its
    18 bits."""
    return (Int32(address) & 0x3FFFF) >> 4


@dsl_user_op
def _scores_async(query, keys, *, loc=None, ip=None):
    steps = []
    for s in range(_STEPS * PANELS):
        at = PANEL_BYTES * (s // _STEPS) + 2 * _CHUNK * (s % _STEPS) >> 4
        steps.append((at, at, s > 0, 0))
    operands = (_units(query), _units(keys))
    return _statement(_wgmma(_SCORES, steps), operands, _SCORES, (), loc, ip)


@dsl_user_op
def _values_async(weights, values, sums, *, loc=None, ip=None):
    steps = [
        (2 * _CHUNK * s >> 4, (2 * _EIGHT_ROWS * s >> 4) + _ACROSS, True, 1)
        for s in range(_STEPS)
    ]
    operands = (_units(weights), _units(values))
    return _statement(_wgmma(_SUMS, steps), operands, _SUMS, sums, loc, ip)


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
def _values_of_step(weights, values, sums, *, loc=None, ip=None):
    code = [_HEAD, _matrices(_A, f"${_SUMS}", 0, 0)]
    for n in range(0, COLUMNS // 8, 2):
        panel, tile = divmod(n, PANEL_ROWS // 8)
        at = PANEL_BYTES * panel
        code.append(_matrices(_B, f"${_SUMS + 1}", tile // 2, at, ".trans"))
        code += [_mma(4 * n, _A, "b0,b1"), _mma(4 * n + 4, _A, "b2,b3")]
    code.append("}")
    return _statement(code, (weights, values), _SUMS, sums, loc, ip)


@cute.jit
def _values_sync(weights, values, sums):
    """A loop, as for the scores."""
    for step in cutlass.range(_STEPS, unroll=1):
        at = weights ^ (step * (2 * _CHUNK))
        sums = _values_of_step(at, values + step * (2 * _EIGHT_ROWS), sums)
    return sums


def _row(address, lane, row_bit, chunk_bit):
    """Where ldmatrix finds this lane's row in a panel's first two chunks: bit
    ``row_bit`` of the lane is the upper eight rows, ``chunk_bit`` the second chunk.
    XORed with 32 i it is that of chunks 2 i and 2 i + 1."""
    row = (lane & 7) + (lane >> row_bit & 1) * 8
    chunk = lane >> chunk_bit & 1
    return address + row * ROW_BYTES + (chunk ^ (lane & 7)) * _CHUNK


def scores(query, keys, warp, lane):
    """Sixteen sums a lane of the scores with the keys' first `KEYS` rows.

    Args:
        query: shared address of the query tile.
        keys: of the first of the `KEYS` rows in the keys' first panel.
        warp: this thread's among its four.
        lane: this thread's.
    """
    if has_wgmma():
        return _scores_async(query, keys)
    mine = query + warp * (16 * ROW_BYTES)
    return _scores_sync(_row(mine, lane, 3, 4), _row(keys, lane, 4, 3))


def values(weights, keys, sums, warp, lane):
    """``sums``, 128 a lane, plus the weights' product with `COLUMNS` columns.

    Args:
        weights: shared address of the panel of weights.
        keys: of the first of four panels.
        sums: Float32, a lane's.
        warp: this thread's among its four.
        lane: this thread's.
    """
    if has_wgmma():
        return _values_async(weights, keys, sums)
    mine = weights + warp * (16 * ROW_BYTES)
    return _values_sync(_row(mine, lane, 3, 4), _row(keys, lane, 3, 4), sums)
