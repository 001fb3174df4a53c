# SPDX-License-Identifier: Apache-2.0
"""Inline PTX of MLA's kernels alone; the rules are those of common/ptx.py."""

from __future__ import annotations

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from verify_kernels.common import ptx


@dsl_user_op
def load_columns(address, offset=0, *, loc=None, ip=None):
    """Four 8x8 matrices of 16-bit elements from shared memory, transposed, by the whole
    warp: ldmatrix with .trans. Four Int32. Clobber.

    Addresses as of `ptx.load_matrices`: lane l gives row l & 7 of matrix l >> 3. Of
    matrix i register i has column lane >> 2, rows 2 (lane & 3) and the next: with k
    along the rows that are stored, the A operand of `mma_16816`.
    """
    i32 = T.i32()
    out = ptx.asm(
        llvm.StructType.get_literal([i32] * 4),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, "
        f"[$4+{offset}];",
        "=r,=r,=r,=r,r",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Int32(llvm.extractvalue(i32, out, [i], loc=loc, ip=ip)) for i in range(4)
    )
