# SPDX-License-Identifier: Apache-2.0
"""The second half: y_m = sum over the experts e that m chose of w_me W2_e h_p.

A CTA owns 16 latent columns of all rows, and its 8 warps share the experts: warp q has
those with ids in the q-th eighth. So a weight is read once, nothing is written but y,
and the order of the sum is fixed by the ids: within a warp ascending, then the warps.

    ahead        tiles of the next two steps (a step is `chunk` tiles of one expert) are
                 on their way
    pairs        which of this lane's tokens chose the expert, and with what weight: the
                 expert's pairs, one after the other, are held against them
    multiply     as in up.py, but the 8 columns are tokens, `blocks` times 8 of them;
                 blocks in which no token chose the expert are passed over
    add          y += w (W2_e h) in fp32 for each expert, one rounding to bf16 at last

A token that did not choose the expert has zeros for h and adds +0: its sum has the
same bits whoever else is there.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from verify_kernels.common import ptx
from verify_kernels.moe.device import (
    factors,
    halfword,
    no_words,
    product,
    put,
    word,
    zeros,
)
from verify_kernels.moe.layout import COLUMNS, ROWS, slots_of

WARPS = 8
THREADS = 32 * WARPS
TILE_BYTES = 512
TOKENS = 8
#: Steps on their way.
DEPTH = 2
STREAM = ".L1::no_allocate"


def chunk_of(inner: int) -> int:
    """Tiles of a step."""
    tiles = inner // COLUMNS
    return next(n for n in (4, 3, 2, 1) if tiles % n == 0)


class ExpertsDownKernel:
    """For up to 8 ``blocks`` rows.

    Args:
        latent: L, rows of the second matrix, a multiple of 16.
        inner: I, columns on this rank, a multiple of 64.
        experts: E, experts that there are, a multiple of 8.
        top_k: K, a power of two.
        blocks: of 8 tokens.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    parameters = (
        "x",
        "words",
        "scales",
        "weights",
        "experts",
        "offsets",
        "pairs",
        "counts",
        "out",
    )
    early_loads = ()

    def __init__(self, latent: int, inner: int, experts: int, top_k: int, blocks: int):
        self.latent = latent
        self.inner = inner
        self.experts = experts
        self.k_bits = top_k.bit_length() - 1
        self.blocks = blocks
        self.chunk = chunk_of(inner)
        self.chunks = inner // (COLUMNS * self.chunk)
        self.slots = slots_of(self.chunk)
        self.step_words = 4 * self.chunk + self.slots // 2
        # Shared memory: the warps' sums; the distinct experts and their offsets.
        self.list_at = WARPS * blocks * TILE_BYTES
        self.offsets_at = self.list_at + 4 * experts
        self.shared_bytes = self.offsets_at + 4 * (experts + 1)

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
            min_blocks_per_mp=2 if self.blocks * self.chunk <= 6 else 1,
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
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        g = lane >> 2
        c = lane & 3
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        cute.arch.griddepcontrol_wait()

        used = counts[0]
        before = Int32(0)
        own = Int32(0)
        bound = warp * (self.experts // WARPS)
        for i in cutlass.range(thread, used, THREADS, unroll=1):
            put(base + self.list_at + 4 * i, experts[i])
            put(base + self.offsets_at + 4 * i, offsets[i])
        if thread == 0:
            put(base + self.offsets_at + 4 * used, offsets[used])
        cute.arch.sync_threads()
        for i in cutlass.range(lane, used, 32, unroll=1):
            expert = word(base + self.list_at + 4 * i)
            before = before + Int32(expert < bound)
            own = own + Int32(
                (expert >= bound) & (expert < bound + self.experts // WARPS)
            )
        for offset in (16, 8, 4, 2, 1):
            before = before + cute.arch.shuffle_sync_bfly(before, offset=offset)
            own = own + cute.arch.shuffle_sync_bfly(own, offset=offset)

        steps = own * self.chunks
        ahead = cute.make_rmem_tensor((DEPTH * self.step_words,), Int32)
        for i in cutlass.range_constexpr(DEPTH):
            self.request(
                ahead, i * self.step_words, words, scales, base, before, i, steps
            )
        count = 4 * self.blocks
        total = cute.make_rmem_tensor((count,), Float32)
        total.fill(Float32(0.0))
        sums = cute.make_rmem_tensor((count,), Float32)
        own_pair = cute.make_rmem_tensor((self.blocks,), Int32)
        shares = cute.make_rmem_tensor((2 * self.blocks,), Float32)
        for step in cutlass.range(steps, unroll=1):
            held = [ahead[i] for i in range(self.step_words)]
            for i in cutlass.range_constexpr((DEPTH - 1) * self.step_words):
                ahead[i] = ahead[i + self.step_words]
            self.request(
                ahead,
                (DEPTH - 1) * self.step_words,
                words,
                scales,
                base,
                before,
                step + DEPTH,
                steps,
            )
            index = before + step // self.chunks
            chunk = step % self.chunks
            if chunk == 0:
                self.choose(own_pair, shares, weights, pairs, base, index, g, c)
                sums.fill(Float32(0.0))
            at = x.iterator.toint() + 2 * COLUMNS * self.chunk * chunk + 32 * c
            for b in cutlass.range_constexpr(self.blocks):
                pair = own_pair[b]
                live = Int32(pair >= 0)
                if cute.arch.vote_ballot_sync(pair >= 0) != 0:
                    row = at + Int64(2 * self.inner) * cutlass.max(pair, Int32(0))
                    acc = self.multiply(row, live, held)
                    for i in cutlass.range_constexpr(4):
                        sums[4 * b + i] = sums[4 * b + i] + acc[i]
                    if chunk == self.chunks - 1:
                        for i in cutlass.range_constexpr(4):
                            n = 4 * b + i
                            total[n] = cute.math.fma(
                                shares[2 * b + i % 2], sums[n], total[n]
                            )

        for b in cutlass.range_constexpr(self.blocks):
            place = base + TILE_BYTES * (self.blocks * warp + b) + 16 * lane
            bits = [ptx.float_bits(total[4 * b + i]) for i in range(4)]
            ptx.store_shared_128_if(place, Int32(1), bits)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, ROWS * out.shape[0], THREADS, unroll=1):
            token = i >> 4
            row = i & 15
            at = base + TILE_BYTES * (token >> 3) + 16 * (4 * (row & 7))
            at = at + 16 * ((token & 7) >> 1) + 8 * (row >> 3) + 4 * (token & 1)
            value = word(at, Float32)
            for w in cutlass.range_constexpr(1, WARPS):
                part = word(at + TILE_BYTES * self.blocks * w, Float32)
                value = value + part
            out[token, ROWS * group + row] = value.to(BFloat16)

    @cute.jit
    def request(self, ahead, to, words, scales, base, before, step, steps):
        """Tiles and scales of a step, if there is one, to ``ahead`` from ``to`` on."""
        group, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        there = step < steps
        step = cutlass.select_(there, step, Int32(0))
        index = before + step // self.chunks
        index = cutlass.select_(there, index, Int32(0))
        expert = word(base + self.list_at + 4 * index)
        number = Int64(expert) * (self.latent // ROWS) + group
        number = number * self.chunks + step % self.chunks
        at = words.iterator.toint() + number * (TILE_BYTES * self.chunk) + 16 * lane
        for t in cutlass.range_constexpr(self.chunk):
            loaded = ptx.load_global_128_if(
                at, Int32(there), TILE_BYTES * t, hint=STREAM
            )
            for i in cutlass.range_constexpr(4):
                ahead[to + 4 * t + i] = loaded[i]
        pair = (lane >> 2) * 2 + ((lane & 3) >> 1)
        at = scales.iterator.toint() + number * (32 * self.slots)
        at = at + 2 * self.slots * pair
        if there:
            pointer = cute.make_ptr(
                Int32, at, cute.AddressSpace.gmem, assumed_align=2 * self.slots
            )
            found = cute.make_tensor(pointer, cute.make_layout(self.slots // 2))
            for i in cutlass.range_constexpr(self.slots // 2):
                ahead[to + 4 * self.chunk + i] = found[i]

    @cute.jit
    def choose(self, own_pair, shares, weights, pairs, base, index, g, c):
        """Of each block this lane's pair, token g, or -1; and the weights of tokens 2 c
        and 2 c + 1, 0 if they did not choose the expert."""
        own_pair.fill(Int32(-1))
        shares.fill(Float32(0.0))
        begin = word(base + self.offsets_at + 4 * index)
        end = word(base + self.offsets_at + 4 * index + 4)
        for i in cutlass.range(begin, end, unroll=1):
            pair = pairs[i]
            token = pair >> self.k_bits
            share = weights[token, pair & ((1 << self.k_bits) - 1)]
            for b in cutlass.range_constexpr(self.blocks):
                if token == TOKENS * b + g:
                    own_pair[b] = pair
                for j in cutlass.range_constexpr(2):
                    if token == TOKENS * b + 2 * c + j:
                        shares[2 * b + j] = share

    @cute.jit
    def multiply(self, at, live, held):
        """A step's sums of eight tokens; this lane's h is at ``at``, if it has one."""
        tokens = []
        for t in cutlass.range_constexpr(self.chunk):
            halves = [
                ptx.load_global_128_if(
                    at, live, 2 * COLUMNS * t + 16 * half, no_words()
                )
                for half in range(2)
            ]
            tokens.append((*halves[0], *halves[1]))
        acc = zeros()
        words = held[4 * self.chunk :]
        for t in cutlass.range_constexpr(self.chunk):
            low, high = factors(halfword(words, t))
            acc = product(acc, held[4 * t : 4 * t + 4], tokens[t], low, high)
        return acc
