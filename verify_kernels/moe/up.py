# SPDX-License-Identifier: Apache-2.0
"""The first half of the chosen experts: h_p = SiTU(W1_e z_m, W3_e z_m) of each pair p.

A pair is a row m and one of the experts e that it chose (`ExpertPlan`). An item of work
is 8 rows of gate and the 8 of up beside them, of one distinct expert, for all rows that
chose it: 16 x L weights, read once. The CTAs, as many as fit the GPU, take items in
turn; the 8 warps of one share K.

    ahead        a warp's tiles of its next item, 16 bytes a lane and tile, are on their
                 way while it multiplies those of this one
    multiply     weights become bf16 in registers and are the 16-row operand of
                 m16n8k16, eight pairs of the expert its 8 columns: a lane loads 32
                 bytes a tile of its pair's row; one without a pair has zeros
    add          the warps' sums meet in shared memory, two areas in turn, and are added
                 in the order of K; SiTU; one rounding to bf16

An expert with more than eight pairs multiplies the weights that it holds again. A
pair's bits depend on its row and expert alone: K is cut the same way for all.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from verify_kernels.common import ptx
from verify_kernels.moe.device import (
    PAIRS,
    factors,
    halfword,
    load_scales,
    load_tile,
    no_words,
    product,
    situ,
    stage,
    word,
    zeros,
)
from verify_kernels.moe.layout import (
    COLUMNS,
    CTAS_PER_SM,
    HALF,
    TILE_BYTES,
    WARPS,
    slots_of,
)

THREADS = 32 * WARPS


class ExpertsUpKernel:
    """For any number of rows and experts.

    Args:
        latent: L, columns of the input, a multiple of 64 up to 4096.
        inner: I, rows of gate and of up on this rank, a multiple of 8.
        experts: E, experts that there are.
        top_k: K, a power of two.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    parameters = (
        "x",
        "words",
        "scales",
        "experts",
        "offsets",
        "pairs",
        "counts",
        "out",
    )
    early_loads = ()

    def __init__(self, latent: int, inner: int, experts: int, top_k: int):
        self.experts = experts
        self.k_bits = top_k.bit_length() - 1
        tiles = latent // COLUMNS
        #: Tiles of a warp, the last ones of which may not be there.
        self.run = -(-tiles // WARPS)
        self.tiles = tiles
        self.slots = slots_of(self.run)
        self.blocks = inner // HALF
        # Shared memory: the warps' sums, twice; the distinct experts, their offsets.
        self.list_at = 2 * WARPS * TILE_BYTES
        self.offsets_at = self.list_at + 4 * experts
        self.shared_bytes = self.offsets_at + 4 * (experts + 1)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [M, L], rows at any multiple of 16 bytes
        words: cute.Tensor,  # int32 [E, I / 8, 8, run, 128]
        scales: cute.Tensor,  # int16 [E, I / 8, 8, 16, slots]
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        out: cute.Tensor,  # bf16 [64 K, I]
        beta: Float32,
        linear: Float32,
        ctas: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            x, words, scales, experts, offsets, pairs, counts, out, beta, linear
        ).launch(
            grid=[ctas, 1, 1],
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
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        out: cute.Tensor,
        beta: Float32,
        linear: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        g = lane >> 2
        c = lane & 3
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = counts[0]
        stage(base + self.list_at, experts, self.experts, thread, THREADS)
        stage(base + self.offsets_at, offsets, self.experts + 1, thread, THREADS)
        cute.arch.sync_threads()

        items = used * self.blocks
        held = cute.make_rmem_tensor((4 * self.run,), Int32)
        exponents = cute.make_rmem_tensor((self.slots // 2,), Int32)
        ahead = cute.make_rmem_tensor((self.slots // 2,), Int32)
        there = first < items
        number = self.place(base, first, there, warp)
        at = words.iterator.toint() + number * (TILE_BYTES * self.run) + 16 * lane
        for t in cutlass.range_constexpr(self.run):
            self.request(held, t, at, there, warp, ())
        load_scales(ahead, scales, number, self.slots, lane, there)
        area = base
        for item in cutlass.range(first, items, step, unroll=1):
            for i in cutlass.range_constexpr(self.slots // 2):
                exponents[i] = ahead[i]
            there = item + step < items
            number = self.place(base, item + step, there, warp)
            at = words.iterator.toint() + number * (TILE_BYTES * self.run) + 16 * lane
            load_scales(ahead, scales, number, self.slots, lane, there)
            index = item // self.blocks
            block = item - index * self.blocks
            begin = word(base + self.offsets_at + 4 * index)
            count = word(base + self.offsets_at + 4 * index + 4) - begin
            for column in cutlass.range(0, count, PAIRS, unroll=1):
                live = Int32(column + g < count)
                pair = pairs[begin + cutlass.min(column + g, count - 1)]
                row = Int64(2) * x.stride[0] * (pair >> self.k_bits)
                row = x.iterator.toint() + row
                row = row + 2 * COLUMNS * self.run * warp + 32 * c
                # The last to multiply these weights makes way for the next item's.
                goes = there & (column + PAIRS >= count)
                acc = self.multiply(row, live, warp, held, exponents, at, goes)
                bits = [ptx.float_bits(value) for value in acc]
                ptx.store_shared_128_if(
                    area + TILE_BYTES * warp + 16 * lane, Int32(1), bits
                )
                cute.arch.sync_threads()
                n = column + (thread >> 3)
                if (thread < HALF * PAIRS) & (n < count):
                    value = self.add(area, thread >> 3, thread & 7, beta, linear)
                    inner = HALF * block + (thread & 7)
                    out[pairs[begin + n], inner] = value.to(BFloat16)
                area = 2 * base + WARPS * TILE_BYTES - area

    @cute.jit
    def place(self, base, item, there, warp):
        """Number of a warp's run of an item, or of another if that is not there."""
        item = cutlass.select_(there, item, Int32(0))
        index = item // self.blocks
        expert = cutlass.max(word(base + self.list_at + 4 * index), Int32(0))
        block = item - index * self.blocks
        return (Int64(expert) * self.blocks + block) * WARPS + warp

    @cute.jit
    def request(self, held, t, at, there, warp, old):
        """A warp's t-th tile of an item, if there is one."""
        live = Int32(there & (warp * self.run + t < self.tiles))
        load_tile(held, t, at, live, old)

    @cute.jit
    def multiply(self, row, live, warp, held, exponents, at, goes):
        """This warp's sums of eight pairs, whose lane's row is at ``row``; if the
        weights go, the tiles at ``at`` take their place."""
        acc = [zeros(), zeros()]
        tokens = self.tokens(row, live, warp, 0)
        for t in cutlass.range_constexpr(self.run):
            current = tokens
            if const_expr(t + 1 < self.run):
                tokens = self.tokens(row, live, warp, t + 1)
            low, high = factors(halfword(exponents, t))
            tile = [held[4 * t + i] for i in range(4)]
            acc[t % 2] = product(acc[t % 2], tile, current, low, high)
            self.request(held, t, at, goes, warp, tile)
        return [a + b for a, b in zip(*acc, strict=True)]

    @cute.jit
    def tokens(self, at, live, warp, t):
        """32 bytes of this lane's row, or zeros."""
        there = live & Int32(warp * self.run + t < self.tiles)
        low = ptx.load_global_128_if(at, there, 2 * COLUMNS * t, no_words())
        high = ptx.load_global_128_if(at, there, 2 * COLUMNS * t + 16, no_words())
        return (*low, *high)

    @cute.jit
    def add(self, area, n, row, beta, linear):
        """The warps' sums of a pair's gate and up, in order, and SiTU of them."""
        at = area + 16 * (4 * row + (n >> 1)) + 4 * (n & 1)
        sums = [Float32(0.0), Float32(0.0)]
        for w in cutlass.range_constexpr(WARPS):
            for half in cutlass.range_constexpr(2):
                part = word(at + TILE_BYTES * w + 8 * half, Float32)
                sums[half] = part if w == 0 else sums[half] + part
        return situ(sums[0], sums[1], beta, linear)
