# SPDX-License-Identifier: Apache-2.0
"""Kernels with a fault that only shows when they run, for the sanitizer's tools.

None of them can hang: nothing waits for what does not come.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

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


class LaneNotInTheMask(Planted):
    """For synccheck: a lane syncs its warp under a mask that leaves it out."""

    pdl = launched_with_pdl = False
    early_loads = ()
    shared_bytes = launched_with_shared = 1024

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        shared = cute.make_tensor(
            cute.arch.get_dyn_smem(Float32, alignment=128), cute.make_layout(64)
        )
        mask = cute.arch.vote_ballot_sync(lane < 16)
        if lane <= 16:
            shared[tid] = x[tid].to(Float32)
            cute.arch.sync_warp(mask)
            y[tid, 0] = shared[tid ^ 1] * w[tid].to(Float32)
        cute.arch.sync_threads()
        y[tid, 1] = shared[tid]


class HalfAWarpAtTheBarrier(Planted):
    """For synccheck: lanes with odd numbers meet at the barrier of the whole CTA, the
    others end. Threads that have ended are not waited for."""

    pdl = launched_with_pdl = False
    early_loads = ()

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        if tid % 2 == 1:
            cute.arch.sync_threads()
            y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class BarrierNotWaitedFor(Planted):
    """For synccheck: a thread arrives in one phase of an mbarrier after the other, and
    nobody waits."""

    pdl = launched_with_pdl = False
    early_loads = ()
    shared_bytes = launched_with_shared = 1024

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        barrier = cute.arch.get_dyn_smem(Int64, alignment=128)
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if tid == 0:
            for _ in cutlass.range(4, unroll=1):
                cute.arch.mbarrier_arrive(barrier)
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class BarrierNotMade(Planted):
    """For synccheck: threads arrive on an mbarrier that nobody has initialised."""

    pdl = launched_with_pdl = False
    early_loads = ()
    shared_bytes = launched_with_shared = 1024

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        barrier = cute.arch.get_dyn_smem(Int64, alignment=128)
        cute.arch.mbarrier_arrive(barrier)
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)
