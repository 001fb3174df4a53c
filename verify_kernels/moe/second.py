# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the second half share, whatever the weights' layout: the lists in
shared memory, whose experts are whose, and where a pair's h is."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.moe.device import no_words, put, stage, word
from verify_kernels.moe.layout import WARPS

THREADS = 32 * WARPS
#: Of h that a lane reads at once: 16 numbers of every 64 columns.
READ_BYTES = 128


class SecondHalf:
    """A step of a warp is ``chunk_columns`` of I of one of its experts.

    Args:
        inner: I, columns.
        experts: E, experts that there are.
        top_k: K, a power of two.
        chunk_columns: those of a step.
        lists_at: where in shared memory the distinct experts, their offsets, the pairs
            and their weights begin; they are the last.
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

    def __init__(
        self, inner: int, experts: int, top_k: int, chunk_columns: int, lists_at: int
    ):
        self.inner = inner
        self.experts = experts
        self.top_k = top_k
        self.k_bits = top_k.bit_length() - 1
        self.chunk_columns = chunk_columns
        self.chunks = inner // chunk_columns
        self.list_at = lists_at
        self.offsets_at = self.list_at + 4 * experts
        self.pairs_at = self.offsets_at + 4 * (experts + 1)
        self.weights_at = self.pairs_at + 4 * MAX_ROWS * top_k
        self.shared_bytes = self.weights_at + 4 * MAX_ROWS * top_k

    @cute.jit
    def stage_lists(self, base, experts, offsets, pairs, weights, rows, thread):
        """To shared memory, by all threads; no barrier."""
        stage(base + self.list_at, experts, self.experts, thread, THREADS)
        stage(base + self.offsets_at, offsets, self.experts + 1, thread, THREADS)
        for i in cutlass.range(thread, rows << self.k_bits, THREADS, unroll=1):
            pair = pairs[i]
            put(base + self.pairs_at + 4 * i, pair)
            # What is past the pairs that there are is no pair.
            pair = cutlass.max(pair, Int32(0))
            share = weights[pair >> self.k_bits, pair & (self.top_k - 1)]
            put(base + self.weights_at + 4 * i, share, Float32)

    @cute.jit
    def deal(self, base, used, lane, part, parts: cutlass.Constexpr):
        """Of the ``used`` distinct experts, how many have ids before those of a part of
        all ids, and how many have ids in it."""
        before = Int32(0)
        own = Int32(0)
        bound = part * (self.experts // parts)
        for i in cutlass.range(lane, used, 32, unroll=1):
            over = word(base + self.list_at + 4 * i) - bound
            before = before + Int32(over < 0)
            own = own + Int32((over >= 0) & (over < self.experts // parts))
        for offset in (16, 8, 4, 2, 1):
            before = before + cute.arch.shuffle_sync_bfly(before, offset=offset)
            own = own + cute.arch.shuffle_sync_bfly(own, offset=offset)
        return before, own

    @cute.jit
    def source(self, x, base, before, step, column, steps):
        """Where this lane's h is, of a step's eight pairs from ``column`` on, and
        whether it has one."""
        lane = cute.arch.lane_idx()
        there = step < steps
        step = cutlass.select_(there, step, Int32(0))
        index = cutlass.select_(there, before + step // self.chunks, Int32(0))
        begin = word(base + self.offsets_at + 4 * index)
        count = word(base + self.offsets_at + 4 * index + 4) - begin
        own = column + (lane >> 2)
        live = there & (own < count)
        own = cutlass.select_(live, begin + own, Int32(0))
        pair = cutlass.max(word(base + self.pairs_at + 4 * own), Int32(0))
        at = x.iterator.toint() + Int64(2 * self.inner) * pair + 32 * (lane & 3)
        return at + 2 * self.chunk_columns * (step % self.chunks), Int32(live)

    @cute.jit
    def fetch(self, tokens, i, row, live):
        """32 bytes of this lane's h, of the i-th 64 columns from ``row`` on, or
        zeros."""
        for half in cutlass.range_constexpr(2):
            loaded = ptx.load_global_128_if(
                row, live, READ_BYTES * i + 16 * half, no_words()
            )
            for j in cutlass.range_constexpr(4):
                tokens[8 * i + 4 * half + j] = loaded[j]
