# SPDX-License-Identifier: Apache-2.0
"""Follows a linked list through memory: one load at a time, so its time is latency."""

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as rt
from cutlass import Int32


class ChaseKernel:
    @cute.jit
    def __call__(self, table: cute.Tensor, out: cute.Tensor, steps: Int32, stream):
        self.kernel(table, out, steps).launch(
            grid=[1, 1, 1], block=[1, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, table: cute.Tensor, out: cute.Tensor, steps: Int32):
        at = Int32(0)
        for _ in cutlass.range(steps, unroll=1):
            at = table[at]
        out[0] = at


def compiled(arch: str):
    """Callable (table int32 [n], out int32 [1], steps): out = the last index."""

    def vector():
        return rt.make_fake_compact_tensor(
            cutlass.Int32, (cute.sym_int(),), assumed_align=4
        )

    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (vector(), vector(), Int32(1), stream)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(ChaseKernel(), *arguments, options=options)
