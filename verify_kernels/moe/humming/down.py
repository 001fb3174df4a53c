# SPDX-License-Identifier: Apache-2.0
"""The second half: y_m = sum over the experts e that m chose of w_me W2_e h_p.

A cluster of two owns 64 latent columns of all rows. Its 16 warps share the experts:
warp q has those with ids in the q-th sixteenth. So a weight is read once, nothing is
written but y, and the order of the sum is fixed by the ids: within a warp ascending,
then the warps of a CTA, then the CTAs.

    lists        the distinct experts, their pairs and the pairs' weights, in shared
                 memory: everything after it needs them
    ahead        a step is `chunk` blocks of one expert; blocks of the next three and
                 the pairs' h of the next one are on their way
    multiply     as in up.py: eight pairs of the expert are the columns
    add          y += w (W2_e h) in fp32, in shared memory of the warp alone, by the
                 lane that has the product
    exchange     each CTA takes the other's sums of 32 of the columns; one rounding to
                 bf16

A token's sum has the same bits whoever else is there: its products do not depend on the
other columns, and experts that it did not choose do not touch it.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.moe.device import PAIRS, no_words, put, word
from verify_kernels.moe.humming.device import (
    TILES,
    factors,
    no_sums,
    product,
    request,
    request_scales,
    words_of,
)
from verify_kernels.moe.humming.layout import (
    BLOCK_BYTES,
    COLUMNS,
    ROWS,
    STEPS_OF_GROUP,
    filled_columns,
    filled_rows,
)
from verify_kernels.moe.layout import WARPS
from verify_kernels.moe.second import THREADS, SecondHalf

CTAS = 2
#: Parts that the experts are dealt out in.
PARTS = CTAS * WARPS
#: Steps whose weights are on their way.
DEPTH = 3
#: Of a warp's sums, [token, column]: lanes of a product meet few banks twice.
PITCH = ROWS + 8
#: Columns of a token that one CTA finishes.
HALF = ROWS // CTAS
#: Blocks whose h a lane reads at once.
BLOCKS_OF_READ = 4


def chunk_of(inner: int) -> int:
    """Blocks of a step."""
    return 8 if inner % (8 * COLUMNS) == 0 else 4


class ExpertsDownKernel(SecondHalf):
    """For any number of rows.

    Args:
        latent: L, rows of the second matrix, a multiple of 64.
        inner: I, columns, a multiple of 64.
        experts: E, experts that there are, a multiple of 16.
        top_k: K, a power of two.
        held: columns that the layer has, I and then zeros.
    """

    def __init__(self, latent: int, inner: int, experts: int, top_k: int, held: int):
        self.latent = latent
        self.chunk = chunk_of(inner)
        self.groups = self.chunk // STEPS_OF_GROUP
        self.rows = filled_rows(latent)
        self.expert_steps = filled_columns(held) // COLUMNS
        self.step_bytes = BLOCK_BYTES * (self.rows // ROWS)
        self.sum_bytes = 4 * MAX_ROWS * PITCH
        # Shared memory: a barrier; the warps' sums; what the other CTA sends; the
        # lists.
        self.sums_at = 16
        self.inbox_at = self.sums_at + WARPS * self.sum_bytes
        super().__init__(
            inner,
            experts,
            top_k,
            COLUMNS * self.chunk,
            self.inbox_at + 4 * MAX_ROWS * HALF,
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [64 K, I]
        words: cute.Tensor,  # int32 [E, I / 16, L / 64, 128], filled up
        scales: cute.Tensor,  # uint8 [E, I / 32, L], filled up
        weights: cute.Tensor,  # fp32 [M, K]
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        out: cute.Tensor,  # bf16 [M, L], rows at any distance
        pdl: Int32,
        stream,
    ):
        self.kernel(
            x, words, scales, weights, experts, offsets, pairs, counts, out
        ).launch(
            grid=[CTAS * (self.latent // ROWS), 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        words: cute.Tensor,
        scales: cute.Tensor,
        weights: cute.Tensor,
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        out: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        rank = number & 1
        group = number >> 1
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        rows = out.shape[0]
        if thread == 0:
            barrier = cute.make_ptr(
                cutlass.Int64, base, cute.AddressSpace.smem, assumed_align=8
            )
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * HALF * rows)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = counts[0]
        self.stage_lists(base, experts, offsets, pairs, weights, rows, thread)
        sums = base + self.sums_at + self.sum_bytes * warp
        for i in cutlass.range(lane, rows * (PITCH // 4), 32, unroll=1):
            ptx.store_shared_128_if(sums + 16 * i, Int32(1), no_words())
        cute.arch.sync_threads()

        before, own = self.deal(base, used, lane, rank * WARPS + warp, PARTS)
        steps = own * self.chunks
        held = [cute.make_rmem_tensor((4 * self.chunk,), Int32) for _ in range(DEPTH)]
        exponents = [
            cute.make_rmem_tensor((2 * self.groups,), Int32) for _ in range(DEPTH)
        ]
        tokens = cute.make_rmem_tensor((2 * self.chunk,), Int32)
        for d in cutlass.range_constexpr(DEPTH):
            live = Int32(d) < steps
            at, scales_at = self.place(
                base, words, scales, before, Int32(d), steps, group, lane
            )
            for t in cutlass.range_constexpr(self.chunk):
                request(held[d], t, at, self.step_bytes * t, Int32(live), ())
            for t in cutlass.range_constexpr(self.groups):
                request_scales(
                    exponents[d], t, scales_at, self.rows * t, Int32(live), ()
                )
        row, there = self.source(x, base, before, Int32(0), Int32(0), steps)
        for i in cutlass.range_constexpr(self.chunk // BLOCKS_OF_READ):
            self.fetch(tokens, i, row, there)
        for first in cutlass.range(0, steps, DEPTH, unroll=1):
            # Each step has registers of its own: to move a word is to wait for it.
            for d in cutlass.range_constexpr(DEPTH):
                step = first + d
                if step < steps:
                    more = step + DEPTH < steps
                    at, scales_at = self.place(
                        base, words, scales, before, step + DEPTH, steps, group, lane
                    )
                    index = before + step // self.chunks
                    begin = word(base + self.offsets_at + 4 * index)
                    count = word(base + self.offsets_at + 4 * index + 4) - begin
                    for column in cutlass.range(0, count, PAIRS, unroll=1):
                        # Next come this expert's other pairs, or the next step.
                        again = column + PAIRS < count
                        then = cutlass.select_(again, step, step + 1)
                        beside = cutlass.select_(again, column + PAIRS, Int32(0))
                        row, there = self.source(x, base, before, then, beside, steps)
                        goes = Int32(more & (column + PAIRS >= count))
                        acc = self.multiply(
                            held[d], exponents[d], tokens, at, scales_at, goes, row,
                            there,
                        )  # fmt: skip
                        self.add(sums, base, begin + column, count - column, acc, lane)
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        self.exchange(base, rows, rank, thread)
        ptx.wait_cluster(base, 0)
        self.store(base, rows, rank, group, thread, out)

    @cute.jit
    def place(self, base, words, scales, before, step, steps, group, lane):
        """Where a lane's blocks and scales of a step begin, or another's if there is no
        such step."""
        step = cutlass.select_(step < steps, step, Int32(0))
        index = cutlass.select_(steps > 0, before + step // self.chunks, Int32(0))
        expert = cutlass.max(word(base + self.list_at + 4 * index), Int32(0))
        first = Int64(expert) * self.expert_steps + step % self.chunks * self.chunk
        at = words.iterator.toint() + self.step_bytes * first
        at = at + BLOCK_BYTES * group + 16 * lane
        scales_at = scales.iterator.toint() + self.rows * (first >> 1)
        return at, scales_at + ROWS * group + 8 * (lane >> 2)

    @cute.jit
    def multiply(self, held, exponents, tokens, at, scales_at, goes, row, live):
        """A step's sums of eight pairs. Each block that was used makes way for the one
        at ``at``, if the weights go, and four blocks' h for the next at ``row``."""
        acc = no_sums()
        scales = []
        for t in cutlass.range_constexpr(self.chunk):
            if cutlass.const_expr(t % STEPS_OF_GROUP == 0):
                scales = factors(exponents, t // STEPS_OF_GROUP)
            block = words_of(held, TILES, t)
            acc = product(acc, block, (tokens[2 * t], tokens[2 * t + 1]), scales)
            request(held, t, at, self.step_bytes * t, goes, block)
            if cutlass.const_expr((t + 1) % STEPS_OF_GROUP == 0):
                group = t // STEPS_OF_GROUP
                old = words_of(exponents, 2, group)
                request_scales(
                    exponents, group, scales_at, self.rows * group, goes, old
                )
            if cutlass.const_expr((t + 1) % BLOCKS_OF_READ == 0):
                self.fetch(tokens, t // BLOCKS_OF_READ, row, live)
        return acc

    @cute.jit
    def add(self, sums, base, first, count, acc, lane):
        """Weighs the products of this lane's two columns, if they are pairs, and adds
        them to their tokens' sums, to which another lane may have added before."""
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(2):
            column = 2 * (lane & 3) + i
            if column < count:
                pair = word(base + self.pairs_at + 4 * (first + column))
                share = word(base + self.weights_at + 4 * (first + column), Float32)
                at = sums + 4 * (PITCH * (pair >> self.k_bits) + (lane >> 2))
                for j in cutlass.range_constexpr(TILES):
                    for half in cutlass.range_constexpr(2):
                        there = at + 4 * (16 * j + 8 * half)
                        total = word(there, Float32)
                        put(
                            there,
                            cute.math.fma(share, acc[j][2 * half + i], total),
                            Float32,
                        )

    def total(self, base, token, quad):
        """The warps' sums of four columns of a token, in order."""
        at = base + self.sums_at + 4 * PITCH * token + 16 * quad
        value = ptx.load_shared_f32x4(at)
        for w in range(1, WARPS):
            part = ptx.load_shared_f32x4(at, self.sum_bytes * w)
            value = tuple(a + b for a, b in zip(value, part, strict=True))
        return value

    @cute.jit
    def exchange(self, base, rows, rank, thread):
        """Sends the other CTA the sums of its columns."""
        other = 1 - rank
        for i in cutlass.range(thread, rows * (HALF // 4), THREADS, unroll=1):
            token = i // (HALF // 4)
            quad = i % (HALF // 4)
            value = self.total(base, token, other * (HALF // 4) + quad)
            there = base + self.inbox_at + 4 * HALF * token + 16 * quad
            ptx.store_remote_f32x4(there, value, base, other)

    @cute.jit
    def store(self, base, rows, rank, group, thread, out):
        """Both CTAs' sums of this one's columns, those of CTA 0 first."""
        for i in cutlass.range(thread, rows * (HALF // 4), THREADS, unroll=1):
            token = i // (HALF // 4)
            quad = i % (HALF // 4)
            own = self.total(base, token, rank * (HALF // 4) + quad)
            there = base + self.inbox_at + 4 * HALF * token + 16 * quad
            other = ptx.load_shared_f32x4(there)
            # Of two numbers the sum is the same in either order.
            column = ROWS * group + HALF * rank + 4 * quad
            for j in cutlass.range_constexpr(4):
                out[token, column + j] = (own[j] + other[j]).to(BFloat16)
