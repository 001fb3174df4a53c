# SPDX-License-Identifier: Apache-2.0
"""Kernels with a fault that only shows when they run: one for each sanitizer tool."""

import cutlass.cute as cute
from cutlass import Float32

from tests.verify_kernels.planted.base import Planted


class PastTheEnd(Planted):
    """For memcheck: one thread writes to the row after y's last."""

    pdl = launched_with_pdl = False
    early_loads = ()

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row = tid
        if tid == 5:
            row = y.shape[0] + 8
        y[row, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class NoBarrier(Planted):
    """For racecheck: a warp reads what the other one wrote, without a barrier."""

    pdl = launched_with_pdl = False
    early_loads = ()
    shared_bytes = launched_with_shared = 1024

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        shared = cute.make_tensor(
            cute.arch.get_dyn_smem(Float32, alignment=128), cute.make_layout(64)
        )
        shared[tid] = x[tid].to(Float32)
        y[tid, 0] = shared[63 - tid] * w[tid].to(Float32)


class HalfAtTheBarrier(Planted):
    """For synccheck: one of two warps reaches the barrier of the whole CTA."""

    pdl = launched_with_pdl = False
    early_loads = ()

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        if tid < 32:
            cute.arch.sync_threads()
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)
