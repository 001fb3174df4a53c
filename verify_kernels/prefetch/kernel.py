# SPDX-License-Identifier: Apache-2.0
"""One bulk prefetch into L2 for every row of a table of (address, bytes).

The table is made once, before serving, and the ranges are static weights: nothing here
depends on an earlier kernel, so it is launched plainly, on a side stream.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from verify_kernels.common import ptx

#: The copy engine of an SM works through its requests one by one, so one warp is
#: enough to keep it busy, and leaves the SM to the kernels of the main stream.
THREADS = 32


class PrefetchKernel:
    """For any number of rows."""

    parameters = ("table",)
    early_loads = ()
    early_release = ""
    pdl = False
    shared_bytes = 0

    @cute.jit
    def __call__(self, table: cute.Tensor, ctas: Int32, stream):
        self.kernel(table).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, table: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first = block * THREADS + thread
        for i in cutlass.range(first, table.shape[0], blocks * THREADS, unroll=1):
            ptx.bulk_prefetch(Int64(table[i, 0]), Int32(table[i, 1]))
