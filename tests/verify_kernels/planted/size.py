# SPDX-License-Identifier: Apache-2.0
"""Kernels that take more than they say or may."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tests.verify_kernels.planted.base import Planted


class RuntimeIndex(Planted):
    """A register array with a run-time index: it goes to local memory."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        kept = cute.make_rmem_tensor((32,), Float32)
        for i in cutlass.range_constexpr(32):
            kept[i] = w[i].to(Float32)
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range(x.shape[0], unroll=1):
            place = Int32(x[i].to(Float32)) & 31
            kept[place] = kept[(place + tid) & 31] + 1.0
        y[tid, 0] = kept[tid & 31]


class SharedNotStated(Planted):
    """The launch asks for more shared memory than is stated."""

    launched_with_shared = 4096

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        base = cute.make_tensor(
            cute.arch.get_dyn_smem(Float32, alignment=128), cute.make_layout(1024)
        )
        cute.arch.griddepcontrol_wait()
        base[tid] = x[tid].to(Float32)
        cute.arch.sync_threads()
        y[tid, 0] = base[63 - tid] * w[tid].to(Float32)


class ManyRegisters(Planted):
    """Two times 32 values of w live at once; nothing spills."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        a = cute.make_rmem_tensor((32,), Float32)
        b = cute.make_rmem_tensor((32,), Float32)
        for i in cutlass.range_constexpr(32):
            a[i] = w[(tid + i) & 127].to(Float32)
            b[i] = w[(tid + i + 32) & 127].to(Float32)
        cute.arch.griddepcontrol_wait()
        for _ in cutlass.range(x.shape[0], unroll=1):
            for i in cutlass.range_constexpr(32):
                a[i] = a[i] * b[(i + 1) % 32] + x[tid].to(Float32)
                b[i] = b[i] * a[(i + 2) % 32]
        total = Float32(0.0)
        for i in cutlass.range_constexpr(32):
            total = total + a[i] + b[i]
        y[tid, 0] = total
