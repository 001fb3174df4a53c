# SPDX-License-Identifier: Apache-2.0
"""The sum of a row's pairs: y_m = sum over k of (sum over parts of out_p), p = m K + k,
and with a norm RMSNorm(y_m).

A thread owns four latent columns of a row, a CTA 512 of K3's, and with a norm a cluster
the row.

    read        all pairs' sums, whether they are there or not, and at the same time the
                plan, which says which are
    add         the parts of a pair, then the pairs in the order of the row's choices;
                one rounding to bf16
    norm        the sum of y^2, of the rounded y, sent by each warp to every CTA, added
                in one order

A row's bits depend on its own pairs alone. A row without an expert gives 0.

Early loads: the norm's weight.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.common.arithmetic import add_tree, halves
from verify_kernels.common.shared import put, word
from verify_kernels.moe.device import open_once

#: Columns of a thread: 16 bytes of fp32.
VECTOR = 4
#: CTAs of a cluster at most that every GPU takes.
MAX_CLUSTER = 8
#: Threads of a CTA at most.
THREADS = 128


class CombineKernel:
    """For up to 64 rows.

    Args:
        latent: L, a multiple of 128; with a norm at most eight CTAs of 32, 64 or 128
            threads.
        top_k: K, a power of two.
        parts: that each pair has.
        norm: apply the norm.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"

    def __init__(self, latent: int, top_k: int, parts: int, norm: bool):
        self.latent = latent
        self.top_k = top_k
        self.k_bits = top_k.bit_length() - 1
        self.parts = parts
        self.norm = norm
        columns = latent // VECTOR
        self.threads = max(n for n in range(32, THREADS + 1, 32) if columns % n == 0)
        self.warps = self.threads // 32
        self.ctas = latent // (VECTOR * self.threads)
        if norm and (self.ctas > MAX_CLUSTER or self.warps not in (1, 2, 4)):
            raise ValueError(
                f"latent={latent}: {self.ctas} CTAs of {self.warps} warps; with a norm "
                f"they may be {MAX_CLUSTER} at most, of 1, 2 or 4 warps each"
            )
        self.pairs = MAX_ROWS * top_k
        weights = ("weight",) if norm else ()
        self.parameters = ("x", "pairs", *weights, "out")
        self.early_loads = weights
        # Shared memory: a barrier; whether each of the row's pairs is there; each
        # warp's sum of squares, by CTA.
        self.there_at = 16
        self.squares_at = self.there_at + 4 * top_k
        self.shared_bytes = self.squares_at + 4 * self.ctas * self.warps

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # fp32 [parts, 64 K, L]
        pairs: cute.Tensor,
        weight,  # bf16 [L]
        out: cute.Tensor,  # bf16 [M, L], rows at any distance
        eps: Float32,
        pdl: Int32,
        stream,
    ):
        cluster = self.norm and self.ctas > 1
        self.kernel(x, pairs, weight, out, eps).launch(
            grid=[self.ctas, out.shape[0], 1],
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1] if cluster else None,
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, pairs: cute.Tensor, weight, out: cute.Tensor, eps: Float32
    ):
        rank, row, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        column = VECTOR * (self.threads * rank + thread)
        for first in range(0, self.top_k, self.threads):
            if first + thread < self.top_k:
                put(base + self.there_at + 4 * (first + thread), Int32(0))
        clustered = self.norm and self.ctas > 1
        if const_expr(clustered):
            open_once(base, thread == 0, 4 * self.ctas * self.warps)
            cute.arch.cluster_arrive_relaxed()
        if const_expr(self.norm):
            # Not a .nc load, which ptxas moves down past the wait.
            weight_words = ptx.load_global_64(weight.iterator.toint() + 2 * column)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        at = x.iterator.toint() + 4 * Int64(self.latent * self.top_k) * row + 4 * column
        sums = [
            [
                ptx.load_global_f32x4(at, 4 * self.latent * (self.pairs * part + slot))
                for part in range(self.parts)
            ]
            for slot in range(self.top_k)
        ]
        self.find(base, pairs, out.shape[0], row, thread)
        cute.arch.sync_threads()
        y = [Float32(0.0)] * VECTOR
        for slot in cutlass.range_constexpr(self.top_k):
            there = word(base + self.there_at + 4 * slot) != 0
            for j in cutlass.range_constexpr(VECTOR):
                value = sums[slot][0][j]
                for part in sums[slot][1:]:
                    value = value + part[j]
                y[j] = y[j] + cutlass.select_(there, value, Float32(0.0))
        words = [ptx.pack_bf16x2(y[2 * i], y[2 * i + 1]) for i in range(2)]
        if const_expr(self.norm):
            y = [v for w in words for v in halves(w)]
            squares = y[0] * y[0]
            for j in cutlass.range_constexpr(1, VECTOR):
                squares = squares + y[j] * y[j]
            squares = cute.arch.warp_reduction_sum(squares)
            lane = cute.arch.lane_idx()
            mine = base + self.squares_at + 4 * (rank * self.warps + thread // 32)
            if const_expr(clustered):
                cute.arch.cluster_wait()
                if lane < self.ctas:
                    ptx.store_remote_f32(mine, squares, base, lane)
                ptx.wait_cluster(base, 0)
            else:
                if lane == 0:
                    ptx.store_shared_f32(mine, squares)
                cute.arch.sync_threads()
            everything = Float32(0.0)
            for i in cutlass.range_constexpr(self.ctas):
                at = base + self.squares_at + 4 * self.warps * i
                of_warps = [word(at + 4 * w, Float32) for w in range(self.warps)]
                everything = everything + add_tree(of_warps)
            spread = cute.math.rsqrt(
                everything * (1.0 / self.latent) + eps, fastmath=True
            )
            scale = [v for w in weight_words for v in halves(w)]
            y = [v * spread * g for v, g in zip(y, scale, strict=True)]
            words = [ptx.pack_bf16x2(y[2 * i], y[2 * i + 1]) for i in range(2)]
        there = out.iterator.toint() + 2 * (Int64(out.stride[0]) * row + column)
        ptx.store_global_64(there, words)

    def find(self, base, pairs, rows, row, thread):
        """Says which of the row's pairs the plan has: those behind the live ones are
        -1."""
        count = rows << self.k_bits
        found = []
        for first in range(0, self.pairs, self.threads):
            index = first + thread
            found.append((index < count, pairs[cutlass.min(index, count - 1)]))
        for valid, pair in found:
            self.mark(base, valid & ((pair >> self.k_bits) == row), pair)

    @cute.jit
    def mark(self, base, mine, pair):
        if mine:
            slot = pair & (self.top_k - 1)
            put(base + self.there_at + 4 * slot, Int32(1))
