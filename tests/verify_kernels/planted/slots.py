# SPDX-License-Identifier: Apache-2.0
"""A ring of bulk copies whose reader hands its slots back in one of several ways."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from tests.verify_kernels.planted.base import Planted
from verify_kernels.common import ptx

STAGES = 2
ROWS = 16
PITCH = 256 + 64
SLOT = ROWS * PITCH
CHUNKS = 4


class Ring(Planted):
    """Warp 0 copies w into 16 rows of a slot, warp 1 multiplies them by x.

    The slot is handed back
        "sums"   after a sum that needs every word read from it: right
        "word"   after one word of the last load in program order
        "order"  after all loads in program order, depending on none
        "early"  before the loads

    With ``matrices`` it is read with ldmatrix, a product's operand at a time.
    """

    shared_bytes = launched_with_shared = 128 + STAGES * SLOT

    def __init__(self, after, matrices=False):
        self.after = after
        self.matrices = matrices

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        full = cute.arch.get_dyn_smem(Uint8, alignment=128).toint()
        empty = full + 8 * STAGES
        ring = full + 128
        turns = x.shape[0]
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2 * STAGES):
                    cute.arch.mbarrier_init(self.barrier(full + 8 * i), 1)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        slot = Int32(0)
        phase = Int32(0)
        if warp == 0:
            for _ in cutlass.range(turns, unroll=1):
                cute.arch.mbarrier_wait(self.barrier(empty + 8 * slot), phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        self.barrier(full + 8 * slot), ROWS * 256
                    )
                    for row in cutlass.range(ROWS, unroll=1):
                        ptx.bulk_load(
                            ring + slot * SLOT + row * PITCH,
                            w.iterator.toint(),
                            256,
                            full + 8 * slot,
                        )
                slot, phase = self.next(slot, phase)
        else:
            held = [
                ptx.load_global_128(x.iterator.toint(), 64 * c) for c in range(CHUNKS)
            ]
            acc = cute.make_rmem_tensor((4,), Float32)
            acc.fill(0.0)
            for _ in cutlass.range(turns, unroll=1):
                cute.arch.mbarrier_wait(self.barrier(full + 8 * slot), phase)
                self.read(acc, held, empty + 8 * slot, ring + slot * SLOT, lane, turns)
                slot, phase = self.next(slot, phase)
            for i in cutlass.range_constexpr(4):
                y[lane, i] = acc[i]

    @cute.jit
    def barrier(self, address):
        return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)

    @cute.jit
    def next(self, slot, phase):
        slot = slot + 1
        if slot == STAGES:
            slot = Int32(0)
            phase = phase ^ 1
        return slot, phase

    @cute.jit
    def read(self, acc, held, empty, slot, lane, turns):
        zero = turns >> 16
        if const_expr(self.after == "early"):
            if lane == 0:
                cute.arch.mbarrier_arrive(self.barrier(empty))
            cute.arch.sync_warp()
        word = Int32(0)
        for c in cutlass.range_constexpr(CHUNKS):
            operands = self.operands(slot, lane, c)
            word = operands[1][3]
            for h in cutlass.range_constexpr(2):
                d = ptx.mma_16816(
                    operands[h],
                    (held[c][2 * h], held[c][2 * h + 1]),
                    tuple(acc[i] for i in range(4)),
                )
                for i in cutlass.range_constexpr(4):
                    acc[i] = d[i]
        if lane == 0:
            if const_expr(self.after == "sums"):
                ptx.arrive_after(empty, ptx.float_bits(acc[0]), zero)
            elif const_expr(self.after == "word"):
                ptx.arrive_after(empty, word, zero)
            elif const_expr(self.after == "order"):
                cute.arch.mbarrier_arrive(self.barrier(empty))

    @cute.jit
    def operands(self, slot, lane, c):
        if const_expr(self.matrices):
            at = slot + lane % 16 * PITCH + lane // 16 * 16 + 64 * c
            operands = (ptx.load_matrices(at), ptx.load_matrices(at, 32))
        else:
            at = slot + lane // 4 * PITCH + lane % 4 * 16
            low = ptx.load_shared_128(at, 64 * c)
            high = ptx.load_shared_128(at, 64 * c + 8 * PITCH)
            operands = (
                (low[0], high[0], low[1], high[1]),
                (low[2], high[2], low[3], high[3]),
            )
        return operands
