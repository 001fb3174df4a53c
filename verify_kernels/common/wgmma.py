# SPDX-License-Identifier: Apache-2.0
"""A segment of a skinny product for the four warps of a warpgroup, as inline PTX.

X lies in shared memory as core matrices of 8 tokens by 16 bytes, 128 bytes each, those
of one tile of 8 tokens one after the other (`store_tokens`). Word q of token t in core
matrix i of a chunk of 32 columns is word i of the 16 bytes that lane 4 t + q has of
that chunk: the permutation of k in which weights come, 16 bytes a lane and row.

So step h of a chunk (16 columns) is core matrices 2 h and 2 h + 1, both for wgmma,
which takes 8 columns a core matrix, and for mma.sync, whose lane 4 t + q takes words q
of token t. Both give the same bits (H200: no difference in 1.5 million outputs).
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl import Arch, BaseDSL
from cutlass.cutlass_dsl import T, dsl_user_op

from verify_kernels.common import ptx

#: Bytes of a core matrix, and of the four that make up a chunk of 32 columns.
CORE_BYTES = 128
CHUNK_BYTES = 4 * CORE_BYTES


def has_wgmma():
    """Whether the architecture that is being traced for multiplies by warpgroup."""
    return BaseDSL._get_dsl().get_arch_enum() == Arch.sm_90a


@dsl_user_op
def store_tokens(address, live, words, *, loc=None, ip=None):
    """A lane's 16 bytes of a chunk, a word to each of its core matrices, where the
    Int32 ``live`` is not 0.

    ``address`` is the chunk's plus 4 times the lane, so no two lanes meet in a bank.
    Clobber.
    """
    stores = "".join(
        f"@p st.shared.b32 [$0+{CORE_BYTES * i}], ${i + 2};" for i in range(4)
    )
    ptx.asm(
        None,
        [Int32(v).ir_value(loc=loc, ip=ip) for v in (address, live, *words)],
        f"{{.reg .pred p; setp.ne.s32 p, $1, 0; {stores}}}",
        "r,r,r,r,r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fence_stores(*, loc=None, ip=None):
    """Lets asynchronous readers see this thread's stores to shared memory. Clobber."""
    ptx.asm(
        None,
        [],
        "fence.proxy.async.shared::cta;",
        "",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


def _segment(code, weights, zero, address, sums, tiles, loc, ip):
    """One statement that multiplies. Its sums are $0 .., then come the weights, which
    it finds in a0 .. too, zero, and the address."""
    first, count = 4 * tiles, len(weights)
    operands = [Int32(w).ir_value(loc=loc, ip=ip) for w in (*weights, zero, address)]
    operands += [Float32(v).ir_value(loc=loc, ip=ip) for v in sums]
    copies = [f"{{.reg .b32 a<{count}>;"]
    copies += [f"or.b32 a{i}, ${first + i}, ${first + count};" for i in range(count)]
    constraints = (
        ["=&f"] * first + ["r"] * (count + 2) + list(map(str, range(len(sums))))
    )
    out = ptx.asm(
        llvm.StructType.get_literal([T.f32()] * first),
        operands,
        "\n".join([*copies, *code, "}"]),
        ",".join(constraints),
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return ptx._values(out, first, T.f32(), Float32, loc, ip)


def _names(letter, first, count):
    return ",".join(f"{letter}{first + i}" for i in range(count))


@dsl_user_op
def multiply_async(
    weights, zero, address, sums, tile_pitch, begin=True, *, loc=None, ip=None
):
    """A segment by wgmma, of a warpgroup whose warps are all here; as `multiply`.

    ``sums`` are overwritten in their registers, or with ``begin`` false added to. One
    statement, which waits for its own end: an asynchronous sum must stay in its
    registers, and no move may come between. Clobber.
    """
    steps, count = len(weights) // 4, len(sums)
    after = count + len(weights)
    shape = f"m64n{2 * count}k16.f32.bf16.bf16"
    code = [
        "{.reg .pred no, yes; .reg .b32 t; .reg .b64 d;",
        f"setp.ne.b32 no, ${after}, 0; setp.eq.b32 yes, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for s in range(steps):
        adds = "yes" if s or not begin else "no"
        # No swizzle; the two core matrices of a step are neighbours.
        low = (2 * CORE_BYTES * s >> 4) + (CORE_BYTES >> 4 << 16)
        code += [
            f"add.s32 t, ${after + 1}, {low}; mov.b64 d, {{t, {tile_pitch >> 4}}};",
            f"wgmma.mma_async.sync.aligned.{shape} {{{_names('$', 0, count)}}}, "
            f"{{{_names('a', 4 * s, 4)}}}, d, {adds}, 1, 1, 0;",
        ]
    code += [
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;}",
    ]
    # In a cluster's CTAs but the first a shared address has the rank above its 18
    # bits.
    address = (Int32(address) & 0x3FFFF) >> 4
    return _segment(code, weights, zero, address, sums, count // 4, loc, ip)


@dsl_user_op
def multiply_sync(
    weights, zero, place, tiles, tile_pitch, sums=(), *, loc=None, ip=None
):
    """A segment by mma.sync, of a warp alone; as `multiply`, ``place`` being the
    address plus 4 times the lane. ``sums``: what is added to, else 0. Clobber."""
    steps, after = len(weights) // 4, 4 * tiles + len(weights)
    code = ["{.reg .b32 b<2>;"]
    if not sums:
        code += [f"mov.f32 ${i}, 0f00000000;" for i in range(4 * tiles)]
    for s in range(steps):
        a = _names("a", 4 * s, 4)
        for n in range(tiles):
            at = tile_pitch * n + 2 * CORE_BYTES * s
            d = _names("$", 4 * n, 4)
            code += [
                f"ld.shared.b32 b0, [${after + 1}+{at}];",
                f"ld.shared.b32 b1, [${after + 1}+{at + CORE_BYTES}];",
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{{d}}}, {{{a}}}, {{b0,b1}}, {{{d}}};",
            ]
    code.append("}")
    return _segment(code, weights, zero, place, sums, tiles, loc, ip)


def multiply(weights, zero, address, lane, sums, total, tile_pitch, begin=True):
    """A segment, or a part of one: a chain of steps of 16 columns in ascending order.

    Args:
        weights: words of the steps, four each: rows g and g + 8 of the warp's 16, word
            2 h of this lane's bytes, then word 2 h + 1.
        zero: 0 at run time and unknown to the compiler. The tensor cores take words in
            another order than loads bring them, and a plain move ptxas would make at
            the load, and wait for it there.
        address: the segment's first core matrix of the first tile of 8 tokens; the same
            in all lanes of the warpgroup.
        lane: this thread's.
        sums: of the segment before, four a tile.
        total: the sums that have been added up. Without wgmma the segment begins when
            they have been; with it, its sums take the registers of ``sums``. Else
            ptxas leaves adding for later until registers run out.
        tile_pitch: bytes from tile to tile.
        begin: the chain begins at zero; else it goes on from ``sums``.

    Returns:
        Four sums a tile: rows g and g + 8, two tokens each.
    """
    if has_wgmma():
        return multiply_async(weights, zero, address, sums, tile_pitch, begin)
    tie = Int32(0)
    for value in total:
        tie = tie | ptx.float_bits(value)
    place = address + 4 * lane + (tie & zero)
    tiles = len(sums) // 4
    return multiply_sync(weights, zero, place, tiles, tile_pitch, () if begin else sums)
