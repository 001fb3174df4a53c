# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the skinny GEMM share."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

#: Weights that go straight to registers are read once, so they leave L1 to the tokens.
STREAM = ".L1::no_allocate.L2::256B"


def add(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))


def add_tree(values):
    """Sum of a list of four-vectors, a power of two of them, in a balanced tree."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [add(a, b) for a, b in pairs]
    return values[0]


@cute.jit
def locate(ws: list, row, k: cutlass.Constexpr):
    """Address of a row of the stacked weights, each row k columns of bf16."""
    address = ws[0].iterator.toint() + Int64(row) * (k * 2)
    begin = Int32(ws[0].shape[0])
    for g in cutlass.range_constexpr(1, len(ws)):
        other = ws[g].iterator.toint() + Int64(row - begin) * (k * 2)
        address = cutlass.select_(row >= begin, other, address)
        begin = begin + ws[g].shape[0]
    return address


@cute.jit
def store(ys: list, ws: list, dtypes: cutlass.Constexpr, token, row, value):
    """One output of a token, in the matrix that the row of the stack belongs to."""
    if cutlass.const_expr(len(ws) == 1):
        ys[0][token, row] = value.to(dtypes[0])
    else:
        begin = Int32(0)
        for g in cutlass.range_constexpr(len(ws)):
            n = Int32(ws[g].shape[0])
            column = row - begin
            if (column >= 0) & (column < n):
                ys[g][token, column] = value.to(dtypes[g])
            begin = begin + n


class GemmKernel:
    """What each kernel states about itself (`verify_kernels.common.variant.Kernel`)."""

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    kept_shared = ()

    def __init__(self, tiling, out_dtypes):
        self.t = tiling
        self.out_dtypes = out_dtypes
        self.groups = len(out_dtypes)
        names = range(self.groups)
        self.early_loads = tuple(f"w{g}" for g in names)
        self.parameters = ("x", *self.early_loads, *(f"y{g}" for g in names))
        self.shared_bytes = tiling.shared_bytes
