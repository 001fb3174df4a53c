# SPDX-License-Identifier: Apache-2.0
"""The second half: y_m = sum over the experts e that m chose of w_me W2_e h_p.

A CTA owns 16 latent columns of all rows, and its 8 warps share the experts: warp q has
those with ids in the q-th eighth. So a weight is read once, nothing is written but y,
and the order of the sum is fixed by the ids: within a warp ascending, then the warps.

    lists        the distinct experts, their pairs and the pairs' weights, in shared
                 memory: everything after it needs them
    ahead        a step is `chunk` tiles of one expert; tiles of the next two and the
                 pairs' h of the next one are on their way
    multiply     as in up.py: eight pairs of the expert are the columns
    add          y += w (W2_e h) in fp32, in shared memory of the warp alone, by the
                 lane that has the product; one rounding to bf16 at the end

A token's sum has the same bits whoever else is there: its products do not depend on the
other columns, and experts that it did not choose do not touch it.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.moe.device import (
    PAIRS,
    factors,
    halfword,
    load_scales,
    load_tile,
    no_words,
    product,
    put,
    word,
    zeros,
)
from verify_kernels.moe.layout import (
    COLUMNS,
    CTAS_PER_SM,
    ROWS,
    TILE_BYTES,
    WARPS,
    chunk_of,
    slots_of,
)
from verify_kernels.moe.second import THREADS, SecondHalf

#: Steps whose weights are on their way.
DEPTH = 2
#: Of a warp's sums, [row of the tile, token]: a row's pitch puts the lanes of a product
#: into different banks, for neighbouring tokens.
PITCH = MAX_ROWS + 8


class ExpertsDownKernel(SecondHalf):
    """For any number of rows.

    Args:
        latent: L, rows of the second matrix, a multiple of 16.
        inner: I, columns on this rank, a multiple of 64.
        experts: E, experts that there are, a multiple of 8.
        top_k: K, a power of two.
    """

    def __init__(self, latent: int, inner: int, experts: int, top_k: int):
        self.latent = latent
        self.chunk = chunk_of(inner)
        self.slots = slots_of(self.chunk)
        # Shared memory: the warps' sums, then the lists.
        super().__init__(
            inner, experts, top_k, COLUMNS * self.chunk, 4 * WARPS * ROWS * PITCH
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [64 K, I]
        words: cute.Tensor,  # int32 [E, L / 16, chunks, chunk, 128]
        scales: cute.Tensor,  # int16 [E, L / 16, chunks, 16, slots]
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
            grid=[self.latent // ROWS, 1, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=CTAS_PER_SM,
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
        group, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = counts[0]
        rows = out.shape[0]
        self.stage_lists(base, experts, offsets, pairs, weights, rows, thread)
        sums = base + 4 * ROWS * PITCH * warp
        for i in cutlass.range(lane, ROWS * PITCH // 4, 32, unroll=1):
            ptx.store_shared_128_if(sums + 16 * i, Int32(1), no_words())
        cute.arch.sync_threads()

        before, own = self.deal(base, used, lane, warp, WARPS)
        steps = own * self.chunks
        tiles = [cute.make_rmem_tensor((4 * self.chunk,), Int32) for _ in range(DEPTH)]
        exponents = [
            cute.make_rmem_tensor((self.slots // 2,), Int32) for _ in range(DEPTH)
        ]
        tokens = cute.make_rmem_tensor((8 * self.chunk,), Int32)
        for d in cutlass.range_constexpr(DEPTH):
            number = self.place(base, before, Int32(d), steps)
            at = words.iterator.toint() + number * (TILE_BYTES * self.chunk)
            for t in cutlass.range_constexpr(self.chunk):
                self.request(tiles[d], t, at, Int32(d) < steps, ())
            load_scales(
                exponents[d], scales, number, self.slots, lane, Int32(d) < steps
            )
        row, live = self.source(x, base, before, Int32(0), Int32(0), steps)
        for t in cutlass.range_constexpr(self.chunk):
            self.fetch(tokens, t, row, live)
        for first in cutlass.range(0, steps, DEPTH, unroll=1):
            # Each step has registers of its own: to move a word is to wait for it.
            for d in cutlass.range_constexpr(DEPTH):
                step = first + d
                if step < steps:
                    there = step + DEPTH < steps
                    number = self.place(base, before, step + DEPTH, steps)
                    at = words.iterator.toint() + number * (TILE_BYTES * self.chunk)
                    index = before + step // self.chunks
                    begin = word(base + self.offsets_at + 4 * index)
                    count = word(base + self.offsets_at + 4 * index + 4) - begin
                    for column in cutlass.range(0, count, PAIRS, unroll=1):
                        # Next come this expert's other pairs, or the next step.
                        more = column + PAIRS < count
                        then = cutlass.select_(more, step, step + 1)
                        beside = cutlass.select_(more, column + PAIRS, Int32(0))
                        row, live = self.source(x, base, before, then, beside, steps)
                        goes = there & (column + PAIRS >= count)
                        acc = self.multiply(
                            tiles[d], exponents[d], tokens, at, goes, row, live
                        )
                        self.add(sums, base, begin + column, count - column, acc)
                    load_scales(exponents[d], scales, number, self.slots, lane, there)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, ROWS * rows, THREADS, unroll=1):
            token = i >> 4
            column = i & 15
            sum_at = base + 4 * (PITCH * column + token)
            value = word(sum_at, Float32)
            for w in cutlass.range_constexpr(1, WARPS):
                value = value + word(sum_at + 4 * ROWS * PITCH * w, Float32)
            out[token, ROWS * group + column] = value.to(BFloat16)

    @cute.jit
    def place(self, base, before, step, steps):
        """Number of a step's tiles, or of another's if there is no such step."""
        group, _, _ = cute.arch.block_idx()
        step = cutlass.select_(step < steps, step, Int32(0))
        index = cutlass.select_(steps > 0, before + step // self.chunks, Int32(0))
        expert = cutlass.max(word(base + self.list_at + 4 * index), Int32(0))
        number = Int64(expert) * (self.latent // ROWS) + group
        return number * self.chunks + step % self.chunks

    @cute.jit
    def request(self, tiles, t, at, there, old):
        """The t-th tile of a step, if it is there."""
        at = at + 16 * cute.arch.lane_idx()
        load_tile(tiles, t, at, Int32(there), old)

    @cute.jit
    def multiply(self, tiles, exponents, tokens, at, goes, row, live):
        """A step's sums of eight pairs. Each tile that was used makes way for the one
        at ``at``, if the weights go, and its h for the next at ``row``."""
        acc = [zeros(), zeros()]
        for t in cutlass.range_constexpr(self.chunk):
            low, high = factors(halfword(exponents, t))
            tile = [tiles[4 * t + i] for i in range(4)]
            own = [tokens[8 * t + i] for i in range(8)]
            acc[t % 2] = product(acc[t % 2], tile, own, low, high)
            self.request(tiles, t, at, goes, tile)
            self.fetch(tokens, t, row, live)
        return [a + b for a, b in zip(*acc, strict=True)]

    @cute.jit
    def add(self, sums, base, first, count, acc):
        """Weighs the products of this lane's two columns, if they are pairs, and adds
        them to their tokens' sums, to which another lane may have added before."""
        lane = cute.arch.lane_idx()
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(2):
            column = 2 * (lane & 3) + j
            if column < count:
                pair = word(base + self.pairs_at + 4 * (first + column))
                share = word(base + self.weights_at + 4 * (first + column), Float32)
                at = sums + 4 * (PITCH * (lane >> 2) + (pair >> self.k_bits))
                for half in cutlass.range_constexpr(2):
                    there = at + 4 * PITCH * 8 * half
                    total = word(there, Float32)
                    put(
                        there,
                        cute.math.fma(share, acc[2 * half + j], total),
                        Float32,
                    )
