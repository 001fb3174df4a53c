# SPDX-License-Identifier: Apache-2.0
"""Inline PTX, every wrapper with its effects stated.

LLVM may delete, merge and move asm that is declared pure, across a store and across
``griddepcontrol.wait`` too. So anything that touches memory is declared with effects,
and `asm` refuses a memory instruction that is not. Three kinds:

    pure        registers only
    effectful   keeps its place among other effectful asm
    clobber     also keeps ordinary loads and stores from passing it

Loads of static weights are effectful without the clobber: they keep their program
order, and other memory operations may pass them.
"""

from __future__ import annotations

import re

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

#: Opcodes that read, write or order memory.
MEMORY = re.compile(
    r"(^|[\s;{}])(@!?\w+\s+)?"
    r"(ld|st|cp|atom|red|prefetch|mbarrier|fence|membar|griddepcontrol|bar|barrier|"
    r"applypriority|discard|multimem|ldmatrix|stmatrix|createpolicy|ldu|tex|wgmma|"
    r"tcgen05|suld|sust|wmma|tensormap)\b"
)


def asm(result, operands, code, constraints, *, effects, clobber=False, loc, ip):
    """One inline PTX statement.

    Raises:
        ValueError: memory is touched by asm declared pure, or a clobber by pure asm.
    """
    if not effects and (clobber or MEMORY.search(code)):
        raise ValueError(
            f"asm {code!r} touches memory but is declared pure; it could be merged or "
            "moved across griddepcontrol.wait: pass effects=True"
        )
    if clobber:
        constraints += ",~{memory}" if constraints else "~{memory}"
    return llvm.inline_asm(
        result,
        operands,
        code,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _values(aggregate, count, kind, wrap, loc, ip):
    return tuple(
        wrap(llvm.extractvalue(kind, aggregate, [i], loc=loc, ip=ip))
        for i in range(count)
    )


def _load(space, count, wrap, address, offset, loc, ip):
    """``count`` words at an address plus a constant. Clobber."""
    kind, letter, width = (
        (T.f32(), "f", "f32") if wrap is Float32 else (T.i32(), "r", "b32")
    )
    places = ",".join(f"${i}" for i in range(count))
    out = asm(
        llvm.StructType.get_literal([kind] * count),
        [address.ir_value(loc=loc, ip=ip)],
        f"ld.{space}.v{count}.{width} {{{places}}}, [${count}+{offset}];",
        f"={letter}," * count + ("l" if isinstance(address, Int64) else "r"),
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return _values(out, count, kind, wrap, loc, ip)


@dsl_user_op
def load_shared_128(address, offset=0, *, loc=None, ip=None):
    """16 bytes at a 32-bit shared address plus a constant; four Int32. Clobber."""
    return _load("shared", 4, Int32, Int32(address), offset, loc, ip)


@dsl_user_op
def load_shared_64(address, offset=0, *, loc=None, ip=None):
    """8 bytes at a 32-bit shared address plus a constant; two Int32. Clobber."""
    return _load("shared", 2, Int32, Int32(address), offset, loc, ip)


@dsl_user_op
def load_shared_16(address, *, loc=None, ip=None):
    """A 16-bit number of shared memory, with its sign, as an Int32. Clobber.

    As an Int16 LLVM multiplies it in 16 bits.
    """
    out = asm(
        T.i32(),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.s16 $0, [$1];",
        "=r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return Int32(out)


@dsl_user_op
def load_shared_f32x4(address, offset=0, *, loc=None, ip=None):
    """Four Float32 at a 16-byte aligned shared address. Clobber."""
    return _load("shared", 4, Float32, Int32(address), offset, loc, ip)


@dsl_user_op
def load_shared_f32x2(address, offset=0, *, loc=None, ip=None):
    """Two Float32 at an 8-byte aligned shared address. Clobber."""
    return _load("shared", 2, Float32, Int32(address), offset, loc, ip)


@dsl_user_op
def load_matrices(address, offset=0, count=4, *, loc=None, ip=None):
    """``count`` (2 or 4) 8x8 matrices of 16-bit elements from shared memory, by the
    whole warp: ldmatrix. As many Int32. Clobber.

    ``address`` is the 32-bit shared address of this lane's row: lane l gives row l & 7
    of matrix l >> 3. A row is 16 bytes, aligned to 16; any pitch. With two matrices the
    addresses of lanes 0 .. 15 count. Register i has of matrix i row lane >> 2, elements
    2 (lane & 3) and the next: for B's columns as rows and matrices along k, the B
    operand of `mma_16816`.
    """
    i32 = T.i32()
    places = ",".join(f"${i}" for i in range(count))
    out = asm(
        llvm.StructType.get_literal([i32] * count),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{places}}}, "
        f"[${count}+{offset}];",
        "=r," * count + "r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return _values(out, count, i32, Int32, loc, ip)


@dsl_user_op
def load_global_128(address, offset=0, *, loc=None, ip=None):
    """16 bytes of global memory that any earlier kernel may have written. Clobber."""
    return _load("global", 4, Int32, Int64(address), offset, loc, ip)


@dsl_user_op
def load_global_64(address, offset=0, *, loc=None, ip=None):
    """8 bytes of global memory that any earlier kernel may have written. Clobber."""
    return _load("global", 2, Int32, Int64(address), offset, loc, ip)


@dsl_user_op
def load_global_f32x4(address, offset=0, *, loc=None, ip=None):
    """Four Float32 at a 16-byte aligned global address. Clobber."""
    return _load("global", 4, Float32, Int64(address), offset, loc, ip)


def _load_if(space, address, live, offset, old, loc, ip, count=4):
    i32 = T.i32()
    places = ",".join(f"${i}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    target = f"{{{places}}}" if count > 1 else places
    out = asm(
        llvm.StructType.get_literal([i32] * count) if count > 1 else i32,
        [v.ir_value(loc=loc, ip=ip) for v in (address, live, *old)],
        f"{{.reg .pred p; setp.ne.s32 p, ${count + 1}, 0; "
        f"@p ld.{space}{vector}.b32 {target}, [${count}+{offset}];}}",
        "=r," * count
        + ("l" if isinstance(address, Int64) else "r")
        + ",r"
        + "".join(f",{i}" for i in range(count) if old),
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return _values(out, count, i32, Int32, loc, ip) if count > 1 else (Int32(out),)


@dsl_user_op
def load_global_128_if(address, live, offset=0, old=(), hint="", *, loc=None, ip=None):
    """`load_global_128` where the Int32 ``live`` is not 0, the words ``old`` elsewhere.

    So it is not issued before the old words have been used: a pipeline in registers
    stays as deep as it is written. Without ``old`` the words are unknown where there is
    no load, and ptxas holds their registers from the kernel's first instruction on.

    ``hint`` are cache qualifiers, for instance ``.L1::no_allocate``: with them too the
    load stays ahead of ``griddepcontrol.wait`` (SASS). Clobber.
    """
    return _load_if(f"global{hint}", Int64(address), Int32(live), offset, old, loc, ip)


@dsl_user_op
def load_global_words_if(address, live, old, *, loc=None, ip=None):
    """As many 32-bit words as ``old`` has, 1, 2 or 4, aligned to all of them, where the
    Int32 ``live`` is not 0, and ``old`` elsewhere; as `load_global_128_if`. Clobber."""
    return _load_if("global", Int64(address), Int32(live), 0, old, loc, ip, len(old))


@dsl_user_op
def load_shared_128_if(address, live, offset=0, old=(), *, loc=None, ip=None):
    """`load_shared_128` where the Int32 ``live`` is not 0, the words ``old`` elsewhere;
    as `load_global_128_if`. Clobber."""
    return _load_if("shared", Int32(address), Int32(live), offset, old, loc, ip)


@dsl_user_op
def load_weights_128(address, offset=0, *, loc=None, ip=None):
    """16 bytes of static weights, read once: no L1, 256 bytes into L2. Effectful.

    Not for a request ahead of ``griddepcontrol.wait``: ptxas moves it behind the wait.
    """
    i32 = T.i32()
    out = asm(
        llvm.StructType.get_literal([i32] * 4),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        f"ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];",
        "=r,=r,=r,=r,l",
        effects=True,
        loc=loc,
        ip=ip,
    )
    return _values(out, 4, i32, Int32, loc, ip)


def _store_global(address, values, loc, ip):
    operands = [Int64(address).ir_value(loc=loc, ip=ip)]
    operands += [Int32(v).ir_value(loc=loc, ip=ip) for v in values]
    places = ",".join(f"${1 + i}" for i in range(len(values)))
    vector = f".v{len(values)}" if len(values) > 1 else ""
    asm(
        None,
        operands,
        f"st.global{vector}.b32 [$0], "
        + (f"{{{places}}};" if vector else f"{places};"),
        "l" + ",r" * len(values),
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_global_128(address, values, *, loc=None, ip=None):
    """Four Int32 to a 16-byte aligned global address. Clobber."""
    _store_global(address, values, loc, ip)


@dsl_user_op
def store_global_64(address, values, *, loc=None, ip=None):
    """Two Int32 to an 8-byte aligned global address. Clobber."""
    _store_global(address, values, loc, ip)


@dsl_user_op
def store_global_words(address, values, *, loc=None, ip=None):
    """1, 2 or 4 Int32 to a global address aligned to all of them. Clobber."""
    _store_global(address, values, loc, ip)


@dsl_user_op
def mma_16816(a, b, c, *, loc=None, ip=None):
    """m16n8k16, bf16 operands a (four Int32) and b (two), fp32 c (four). Pure."""
    f32 = T.f32()
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (*a, *b)]
    operands += [Float32(v).ir_value(loc=loc, ip=ip) for v in c]
    out = asm(
        llvm.StructType.get_literal([f32] * 4),
        operands,
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, "
        "{$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        effects=False,
        loc=loc,
        ip=ip,
    )
    return _values(out, 4, f32, Float32, loc, ip)


@dsl_user_op
def mul_bf16x2(a, b, *, loc=None, ip=None):
    """Products of two pairs of bf16, subnormal numbers included. Pure."""
    i32 = T.i32()
    out = asm(
        i32,
        [Int32(v).ir_value(loc=loc, ip=ip) for v in (a, b)],
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        effects=False,
        loc=loc,
        ip=ip,
    )
    return Int32(out)


@dsl_user_op
def copy_async_128_if(
    shared, source, live, place=0, offset=0, hint="", size=None, *, loc=None, ip=None
):
    """Asynchronous copy of 16 bytes, global to shared, where the Int32 ``live`` is not
    0; ``place`` and ``offset`` are constants beside the two addresses.

    The lane itself waits for it (`commit_copies`, `wait_copies`), so a place that no
    other lane uses needs no barrier. It passes loads under way: the place must not have
    any. ``size``: an Int32, 16, or 0 for zeros. Clobber.
    """
    operands = [
        Int32(shared).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        Int32(live).ir_value(loc=loc, ip=ip),
    ]
    if size is not None:
        operands.append(Int32(size).ir_value(loc=loc, ip=ip))
    asm(
        None,
        operands,
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        f"@p cp.async.cg.shared.global{hint} [$0+{place}], [$1+{offset}], 16"
        + ("" if size is None else ", $3")
        + ";}",
        "r,l,r" + ("" if size is None else ",r"),
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def commit_copies(*, loc=None, ip=None):
    """This thread's copies since the last time are a group, also if none. Clobber."""
    asm(
        None,
        [],
        "cp.async.commit_group;",
        "",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def wait_copies(left, *, loc=None, ip=None):
    """Waits for all of this thread's groups of copies but the last ``left``, a
    constant. Clobber."""
    asm(
        None,
        [],
        f"cp.async.wait_group {left};",
        "",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_load(shared, source, size, barrier, *, loc=None, ip=None):
    """Asynchronous copy of ``size`` bytes, global to shared, completing on ``barrier``.

    Addresses are integers; all of them and the size are multiples of 16. Clobber.
    """
    asm(
        None,
        [
            Int32(shared).ir_value(loc=loc, ip=ip),
            Int64(source).ir_value(loc=loc, ip=ip),
            Int32(size).ir_value(loc=loc, ip=ip),
            Int32(barrier).ir_value(loc=loc, ip=ip),
        ],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[$0], [$1], $2, [$3];",
        "r,l,r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_prefetch(source, size, *, loc=None, ip=None):
    """Ask L2 for ``size`` bytes of global memory. Both multiples of 16. Clobber."""
    asm(
        None,
        [
            Int64(source).ir_value(loc=loc, ip=ip),
            Int32(size).ir_value(loc=loc, ip=ip),
        ],
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive_after(barrier, data, zero, *, loc=None, ip=None):
    """Arrive on a shared-memory barrier once ``data`` (an Int32) has been computed.

    ``zero`` must be 0 at run time and unknown to the compiler. The barrier's address
    is computed from ``data & zero``, so the arrival cannot be issued before all that
    ``data`` is computed from has been loaded. Without that dependence ptxas lets the
    arrival pass loads in flight, and the slot can be overwritten under them (rings
    without it gave wrong rows in 7 to 20 % of launches, H200, 2026-11-29). Clobber.
    """
    asm(
        None,
        [
            Int32(barrier).ir_value(loc=loc, ip=ip),
            Int32(data).ir_value(loc=loc, ip=ip),
            Int32(zero).ir_value(loc=loc, ip=ip),
        ],
        "{.reg .b32 t; and.b32 t, $1, $2; add.s32 t, t, $0; "
        "mbarrier.arrive.shared::cta.b64 _, [t];}",
        "r,r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive_remote_after(barrier, rank, data, zero, *, loc=None, ip=None):
    """`arrive_after` on the same barrier of CTA ``rank`` of the cluster. Clobber."""
    asm(
        None,
        [
            Int32(barrier).ir_value(loc=loc, ip=ip),
            Int32(rank).ir_value(loc=loc, ip=ip),
            Int32(data).ir_value(loc=loc, ip=ip),
            Int32(zero).ir_value(loc=loc, ip=ip),
        ],
        "{.reg .b32 t, r; and.b32 t, $2, $3; add.s32 t, t, $0; "
        "mapa.shared::cluster.u32 r, t, $1; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [r];}",
        "r,r,r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive_remote_expecting(barrier, rank, size, *, loc=None, ip=None):
    """Arrives on the same barrier of CTA ``rank`` and tells it of ``size`` bytes more,
    of this CTA's remote stores. Clobber."""
    asm(
        None,
        [
            Int32(barrier).ir_value(loc=loc, ip=ip),
            Int32(rank).ir_value(loc=loc, ip=ip),
            Int32(size).ir_value(loc=loc, ip=ip),
        ],
        "{.reg .b32 r; mapa.shared::cluster.u32 r, $0, $1; "
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [r], $2;}",
        "r,r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_remote_f32x4(shared, values, barrier, rank, *, loc=None, ip=None):
    """Four Float32 to the same shared address of CTA ``rank``, counted by its barrier.

    ``shared`` is 16-byte aligned; 16 bytes complete on ``barrier`` there. Clobber.
    """
    operands = [
        Int32(shared).ir_value(loc=loc, ip=ip),
        Int32(barrier).ir_value(loc=loc, ip=ip),
        Int32(rank).ir_value(loc=loc, ip=ip),
    ]
    operands += [Float32(v).ir_value(loc=loc, ip=ip) for v in values]
    asm(
        None,
        operands,
        "{.reg .b32 d, m; mapa.shared::cluster.u32 d, $0, $2; "
        "mapa.shared::cluster.u32 m, $1, $2; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[d], {$3,$4,$5,$6}, [m];}",
        "r,r,r,f,f,f,f",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def wait_cluster(barrier, phase, *, loc=None, ip=None):
    """Wait for a barrier whose data came from other CTAs of the cluster. Clobber."""
    asm(
        None,
        [
            Int32(barrier).ir_value(loc=loc, ip=ip),
            Int32(phase).ir_value(loc=loc, ip=ip),
        ],
        "{.reg .pred p; WAIT_${:uid}: "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], $1; "
        "@!p bra WAIT_${:uid};}",
        "r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def permute(a, b, chosen, *, loc=None, ip=None):
    """Four bytes of the eight of two Int32, 0 .. 3 those of ``a``: which, from the
    lowest on, a constant's hexadecimal digits say. Pure."""
    out = asm(
        T.i32(),
        [Int32(v).ir_value(loc=loc, ip=ip) for v in (a, b)],
        f"prmt.b32 $0, $1, $2, {chosen};",
        "=r,r,r",
        effects=False,
        loc=loc,
        ip=ip,
    )
    return Int32(out)


@dsl_user_op
def divide_full(a, b, *, loc=None, ip=None):
    """a / b as Triton divides Float32: 2 ulp, whatever the sizes. Pure."""
    out = asm(
        T.f32(),
        [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b)],
        "div.full.f32 $0, $1, $2;",
        "=f,f,f",
        effects=False,
        loc=loc,
        ip=ip,
    )
    return Float32(out)


@dsl_user_op
def float_bits(value, *, loc=None, ip=None):
    """The bits of a Float32 as Int32. Pure."""
    bits = llvm.bitcast(
        T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip
    )
    return Int32(bits)


@dsl_user_op
def float_from_bits(bits, *, loc=None, ip=None):
    """The Float32 of an Int32's bits. Pure."""
    value = llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return Float32(value)


@dsl_user_op
def pack_bf16x2(low, high, *, loc=None, ip=None):
    """Two Float32, rounded to nearest even, as the bf16 halves of an Int32. Pure."""
    word = asm(
        T.i32(),
        [
            Float32(high).ir_value(loc=loc, ip=ip),
            Float32(low).ir_value(loc=loc, ip=ip),
        ],
        "cvt.rn.bf16x2.f32 $0, $1, $2;",
        "=r,f,f",
        effects=False,
        loc=loc,
        ip=ip,
    )
    return Int32(word)


@dsl_user_op
def store_shared_f32(address, value, *, loc=None, ip=None):
    """One Float32 to a shared address. Clobber."""
    asm(
        None,
        [
            Int32(address).ir_value(loc=loc, ip=ip),
            Float32(value).ir_value(loc=loc, ip=ip),
        ],
        "st.shared.f32 [$0], $1;",
        "r,f",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_shared_128_if(address, live, values, *, loc=None, ip=None):
    """Four Int32 to a 16-byte aligned shared address where ``live``, an Int32, is not
    0. Clobber."""
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (address, live, *values)]
    asm(
        None,
        operands,
        "{.reg .pred p; setp.ne.s32 p, $1, 0; "
        "@p st.shared.v4.b32 [$0], {$2,$3,$4,$5};}",
        "r,r,r,r,r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_remote_f32(shared, value, barrier, rank, *, loc=None, ip=None):
    """One Float32 to the same shared address of CTA ``rank``, counted by its barrier.

    4 bytes complete on ``barrier`` there. Clobber.
    """
    asm(
        None,
        [
            Int32(shared).ir_value(loc=loc, ip=ip),
            Int32(barrier).ir_value(loc=loc, ip=ip),
            Int32(rank).ir_value(loc=loc, ip=ip),
            Float32(value).ir_value(loc=loc, ip=ip),
        ],
        "{.reg .b32 d, m; mapa.shared::cluster.u32 d, $0, $2; "
        "mapa.shared::cluster.u32 m, $1, $2; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [d], $3, [m];}",
        "r,r,r,f",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
