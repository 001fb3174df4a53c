# SPDX-License-Identifier: Apache-2.0
"""Kernels whose accesses are on the wrong side of the wait or the release."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from tests.verify_kernels.planted.base import Planted
from verify_kernels.common import ptx


class Clean(Planted):
    """Static weights before the wait, everything else after it, release last."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        weight = w[tid].to(Float32)
        cute.arch.griddepcontrol_wait()
        y[tid, 0] = weight * x[tid].to(Float32)
        cute.arch.griddepcontrol_launch_dependents()


class CleanWithoutPdl(Planted):
    """No programmatic attribute, so everything before the launch is ordered."""

    pdl = launched_with_pdl = False
    early_loads = ()

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class CleanBulk(Planted):
    """A producer role copies and prefetches listed weights; both roles wait."""

    shared_bytes = launched_with_shared = 1024

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        base = cute.arch.get_dyn_smem(Int32, alignment=128).toint()
        barrier = cute.make_ptr(Int64, base, cute.AddressSpace.smem, assumed_align=8)
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            if tid == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 256)
                ptx.bulk_load(base + 128, w.iterator.toint(), 256, base)
                ptx.bulk_prefetch(w.iterator.toint(), 256)
            cute.arch.griddepcontrol_wait()
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.mbarrier_wait(barrier, 0)
            weight = ptx.load_shared_f32x4(base, 128)
            y[tid, 0] = weight[0] * x[tid].to(Float32)


class HoistedRead(Planted):
    """x is read before the wait."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        value = w[tid].to(Float32) * x[tid].to(Float32)
        cute.arch.griddepcontrol_wait()
        y[tid, 0] = value


class HoistedInOneRole(Planted):
    """Both warps wait; the second one reads x first."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            cute.arch.griddepcontrol_wait()
            y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)
        else:
            value = x[tid].to(Float32)
            cute.arch.griddepcontrol_wait()
            y[tid, 1] = value * w[tid].to(Float32)


class HoistedIndex(Planted):
    """Positions are read before the wait, and with them w."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        weight = w[x[tid]].to(Float32)
        cute.arch.griddepcontrol_wait()
        y[tid, 0] = weight


class HoistedCopy(Planted):
    """An asynchronous copy of x starts before the wait."""

    shared_bytes = launched_with_shared = 1024

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        base = cute.arch.get_dyn_smem(Int32, alignment=128).toint()
        barrier = cute.make_ptr(Int64, base, cute.AddressSpace.smem, assumed_align=8)
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 128)
            ptx.bulk_load(base + 128, x.iterator.toint(), 128, base)
        cute.arch.griddepcontrol_wait()
        cute.arch.mbarrier_wait(barrier, 0)
        y[tid, 0] = ptx.load_shared_f32x4(base, 128)[0] * w[tid].to(Float32)


class EitherAddress(Planted):
    """The early load is from w or from x, as a number at run time says."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        address = w.iterator.toint()
        if x.shape[0] > 7:
            address = x.iterator.toint()
        value = ptx.load_weights_128(address)
        cute.arch.griddepcontrol_wait()
        y[tid, 0] = Float32(value[0])


class UnknownAddress(Planted):
    """The early load is through an address that was itself read from w."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        word = ptx.load_weights_128(w.iterator.toint())
        value = ptx.load_weights_128(Int64(word[0]))
        cute.arch.griddepcontrol_wait()
        y[tid, 0] = Float32(value[0])


class EarlyStore(Planted):
    """y is written before the wait: an earlier kernel may still read it."""

    early_loads = ("w", "y")

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        y[tid, 1] = Float32(0.0)
        cute.arch.griddepcontrol_wait()
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class RoleWithoutWait(Planted):
    """The second warp only warms weights, and ends without the wait."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            cute.arch.griddepcontrol_wait()
            y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)
        elif tid == 32:
            ptx.bulk_prefetch(w.iterator.toint(), 256)


class BarrierInsteadOfWait(Planted):
    """The first warp waits and the second takes a CTA barrier for a wait."""

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            cute.arch.griddepcontrol_wait()
        cute.arch.sync_threads()
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class ReleaseBeforeStore(Planted):
    """Dependents are released before y is stored."""

    def __init__(self, reason: str = ""):
        self.early_release = reason

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


class PdlNotStated(Planted):
    """Launched with the programmatic attribute, stated to be plain; it never waits."""

    pdl = False

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        y[tid, 0] = w[tid].to(Float32) * x[tid].to(Float32)


@dsl_user_op
def pure_load(address, *, loc=None, ip=None):
    """A load that LLVM takes for arithmetic."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int64(address).ir_value(loc=loc, ip=ip)],
            "ld.global.b32 $0, [$1];",
            "=r,l",
            has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


class PureLoad(Planted):
    """x is read by asm declared pure, before a store and after it.

    With ``hoisted`` it is also read once before the wait, in vain.
    """

    def __init__(self, hoisted: bool = False):
        self.hoisted = hoisted

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        address = x.iterator.toint()
        before = Int32(0)
        if const_expr(self.hoisted):
            before = pure_load(address)
        cute.arch.griddepcontrol_wait()
        value = pure_load(address)
        y[tid, 0] = Float32(value + before)
        y[tid, 1] = Float32(pure_load(address)) * w[tid].to(Float32)
