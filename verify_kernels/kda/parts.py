# SPDX-License-Identifier: Apache-2.0
"""What the KDA kernel is made of: shared memory and its places, a row's vectors, the
decays, the output of a row, and what is left for the next step."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from verify_kernels.common import ptx
from verify_kernels.common.arithmetic import add_tree, halves
from verify_kernels.kda.device import (
    dot,
    exp_of,
    over_lanes,
    sigmoid,
)

#: K and V.
DIM = 128
TAPS = 4
MAX_WIDTH = 8
#: Lanes of a channel, and the columns of one.
PARTS = 16
COLUMNS = DIM // PARTS
#: Of a shuffle: within the lane's sixteen.
SIXTEEN = (32 - PARTS) << 8 | 31
#: Whatever the cluster.
THREADS = 256
WARPS = THREADS // 32
#: Channels whose squares are added first, and such sums of a head.
QUAD = 4
QUADS = DIM // QUAD
L2_EPS = 1e-6

#: Vectors of 128 Float32 a row, in shared memory [kind, row, channel]; the first three
#: are the convolution's, the last three those of rows that wait.
QUERY, KEY, VALUE, DECAY, OLD_U, OLD_KEY, OLD_DECAY = range(7)
KINDS = 7
VECTOR_BYTES = 4 * DIM
KIND_BYTES = MAX_WIDTH * VECTOR_BYTES
#: Of a head's bf16 columns of one kind in a packed row or a window entry.
LINE_BYTES = 2 * DIM
ENTRY_BYTES = 3 * LINE_BYTES
SQUARES_BYTES = 4 * QUADS
#: Barriers: taps of the convolution; state and rows that wait; squares.
TAPS_FULL, STATE_FULL, SQUARES_FULL = (8 * i for i in range(3))


class KdaParts:
    """Layout and steps of `verify_kernels.kda.kernel.KdaKernel`; arguments as there."""

    def __init__(self, ctas: int, fold: bool, rolling: bool):
        self.ctas = ctas
        self.fold = fold
        self.rolling = rolling
        self.kinds = KINDS if fold else OLD_U
        #: Taps that stay in front of a step's rows in the window. A rolling one drops
        #: the oldest: one row at least is accepted.
        self.past = TAPS - 2 if rolling else TAPS - 1
        #: Accepted rows at the least, whose taps are at the window's begin.
        self.least = TAPS - 1 - self.past
        #: Of a CTA.
        self.channels = DIM // ctas
        #: Fours of channels of a CTA, a power of two.
        self.chunks = self.channels // QUAD
        self.chunk_bits = self.chunks.bit_length() - 1
        #: Of sixteen lanes, and how many of them hold one of their 2 E sums.
        self.each = self.channels * PARTS // THREADS
        self.span = PARTS // (2 * self.each)

        #: Registers are left to load a row while the one before it is computed.
        self.ahead = self.each <= 2
        self.folds = 4 if self.ahead else 1

        # Shared memory: barriers; beta of eight rows, the slots of snapshots, products
        # of key and query; the vectors; bf16 lines. The outputs take the place of the
        # taps, and the new rows' u that of the old ones': two CTAs of a whole head fit
        # an SM.
        self.betas_at = 32
        self.targets_at = 64
        self.products_at = 96
        self.vectors_at = 128
        self.lines_at = self.vectors_at + self.kinds * KIND_BYTES
        self.gates_at = self.lines_at + (TAPS - 1 + MAX_WIDTH) * ENTRY_BYTES
        self.f_at = self.gates_at + MAX_WIDTH * LINE_BYTES
        self.taps_at = self.f_at + MAX_WIDTH * LINE_BYTES
        self.outputs_at = self.taps_at
        self.state_at = self.taps_at + 3 * 4 * TAPS * DIM
        self.squares_at = self.state_at + self.channels * VECTOR_BYTES
        self.shared_bytes = self.squares_at + MAX_WIDTH * SQUARES_BYTES

    @cute.jit
    def barrier(self, address):
        return cute.make_ptr(
            cutlass.Int64, address, cute.AddressSpace.smem, assumed_align=8
        )

    @cute.jit
    def expect(self, address, size):
        """The one arrival of a barrier: it opens when ``size`` bytes have come."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(address), size)

    @cute.jit
    def bf16_at(self, row, column):
        """An element of a row, whose address is 64-bit: its stride is the caller's."""
        pointer = cute.make_ptr(
            BFloat16,
            row + Int64(2) * column,
            cute.AddressSpace.gmem,
            assumed_align=2,
        )
        return cute.make_tensor(pointer, cute.make_layout(1))[0].to(Float32)

    @cute.jit
    def slot_of(self, records, slot):
        """Address of a slot's records of Float32."""
        return records.iterator.toint() + Int64(4) * records.stride[0] * slot

    @cute.jit
    def first_tap(self, count):
        """Entry of the window with the first of three past taps once ``count`` rows
        are folded."""
        if const_expr(self.rolling):
            count = cutlass.max(count, Int32(1)) - 1
        return count

    @cute.jit
    def element(self, address, kind=Float32):
        """An element of shared memory."""
        return self.shared(address, kind, 1)

    @cute.jit
    def some(self, address, kind=BFloat16):
        """This lane's E neighbouring elements of shared memory, as Float32."""
        found = self.shared(address, kind, self.each)
        return [found[r].to(Float32) for r in range(self.each)]

    @cute.jit
    def shared(self, address, kind, count):
        pointer = cute.make_ptr(
            kind,
            address,
            cute.AddressSpace.smem,
            assumed_align=count * kind.width // 8,
        )
        return cute.make_tensor(pointer, cute.make_layout(count))

    @cute.jit
    def convolved(self, base, row, kind, lane):
        """Convolution and SiLU of a row of q, k or v: four channels a lane, two of each
        half."""
        lines = base + self.lines_at + ENTRY_BYTES * row + LINE_BYTES * kind + 4 * lane
        taps = base + self.taps_at + 4 * TAPS * (DIM * kind + 2 * lane)
        x = []
        for half in cutlass.range_constexpr(2):
            words = [
                self.shared(lines + ENTRY_BYTES * i + DIM * half, Int32, 1)[0]
                for i in range(TAPS)
            ]
            rows = [halves(word) for word in words]
            for c in cutlass.range_constexpr(2):
                offset = 4 * TAPS * (DIM // 2 * half + c)
                weights = ptx.load_shared_f32x4(taps, offset)
                total = weights[0] * rows[0][c]
                for i in cutlass.range_constexpr(1, TAPS):
                    total = cute.math.fma(weights[i], rows[i][c], total)
                x.append(total * sigmoid(total))
        return x

    @cute.jit
    def vectors(self, base, row, lane):
        """A warp's row: v, and q and k of unit length, q times 128^-1/2, and their
        product."""
        x = [self.convolved(base, row, kind, lane) for kind in range(3)]
        q, k = x[QUERY], x[KEY]
        of_q, of_k, of_both = over_lanes([dot(q, q), dot(k, k), dot(q, k)])
        unit_q = cute.math.rsqrt(of_q + L2_EPS, fastmath=True) * DIM**-0.5
        unit_k = cute.math.rsqrt(of_k + L2_EPS, fastmath=True)
        place = base + self.vectors_at + VECTOR_BYTES * row
        for kind, unit in ((QUERY, unit_q), (KEY, unit_k), (VALUE, None)):
            for half in cutlass.range_constexpr(2):
                at = place + KIND_BYTES * kind + 8 * lane + 2 * DIM * half
                pair = self.shared(at, Float32, 2)
                for c in cutlass.range_constexpr(2):
                    value = x[kind][2 * half + c]
                    pair[c] = value if unit is None else value * unit
        if lane == 0:
            product = of_both * unit_q * unit_k
            ptx.store_shared_f32(base + self.products_at + 4 * row, product)

    @cute.jit
    def decays(self, base, filter_row, words, bias, rate, lower_bound, lane):
        """e^g of a warp's 16 channels for eight rows: W_fb f_a rounded to bf16, columns
        of K in the same permutation of both. The rows past the width have what the last
        one has."""
        tokens = base + self.f_at + LINE_BYTES * (lane // 4) + 16 * (lane % 4)
        zero = Float32(0.0)
        sums = [(zero, zero, zero, zero)] * 2
        for i in cutlass.range_constexpr(4):
            low, high = words[2 * i], words[2 * i + 1]
            x = ptx.load_shared_128(tokens, 64 * i)
            for j in cutlass.range_constexpr(2):
                a = (low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1])
                sums[j] = ptx.mma_16816(a, (x[2 * j], x[2 * j + 1]), sums[j])
        steepness = exp_of(rate)
        place = base + self.vectors_at + DECAY * KIND_BYTES + 4 * filter_row
        place = place + 2 * VECTOR_BYTES * (lane % 4)
        for i in cutlass.range_constexpr(4):
            raw = sums[0][i] + sums[1][i]
            low_rank, _ = halves(ptx.pack_bf16x2(raw, raw))
            g = lower_bound * sigmoid(steepness * (low_rank + bias[i // 2]))
            offset = VECTOR_BYTES * (i % 2) + 4 * 8 * (i // 2)
            ptx.store_shared_f32(place + offset, exp_of(g))

    @cute.jit
    def store_state(self, address, s):
        for i in cutlass.range_constexpr(2 * self.each):
            words = [ptx.float_bits(s[4 * i + j]) for j in range(4)]
            offset = VECTOR_BYTES * (i // 2) + 256 * (i % 2)
            ptx.store_global_128(address + offset, words)

    @cute.jit
    def store_snapshot(self, address, pitch, slot, s):
        """The state to a slot, if there is one; ``address`` is of slot 0."""
        if slot > 0:
            self.store_state(address + pitch * slot, s)

    @cute.jit
    def four(self, columns, kind, row, i):
        """The i-th four of this lane's columns of a vector."""
        return ptx.load_shared_f32x4(
            columns + kind * KIND_BYTES + VECTOR_BYTES * row, 256 * i
        )

    @cute.jit
    def fetch(self, row, columns, t):
        """Decay, key and query of a row: this lane's columns, eight of each."""
        for n, kind in enumerate((DECAY, KEY, QUERY)):
            for i in cutlass.range_constexpr(COLUMNS // 4):
                four = self.four(columns, kind, t, i)
                for j in cutlass.range_constexpr(4):
                    row[COLUMNS * n + 4 * i + j] = four[j]

    @cute.jit
    def fold_rows(self, s, columns, changes, count):
        """S <- S diag(a) + u k^T of ``count`` rows that wait, in order: this lane's
        columns of its channels, s[r, 4 i + j], whose u of row 0 is at ``changes``."""
        for t in cutlass.range(count, unroll=self.folds):
            u_t = self.some(changes + VECTOR_BYTES * t, Float32)
            for i in cutlass.range_constexpr(COLUMNS // 4):
                a = self.four(columns, OLD_DECAY, t, i)
                k = self.four(columns, OLD_KEY, t, i)
                for r in cutlass.range_constexpr(self.each):
                    for j in cutlass.range_constexpr(4):
                        n = COLUMNS * r + 4 * i + j
                        s[n] = cute.math.fma(u_t[r], k[j], s[n] * a[j])

    @cute.jit
    def scales(self, norm, rank, lane):
        """The norm's weights of this lane's channels in `finish`, as words."""
        chunk = cutlass.min(lane, self.chunks - 1)
        channel = QUAD * (self.chunks * rank + chunk)
        return ptx.load_global_128(norm.iterator.toint() + Int64(4) * channel)

    @cute.jit
    def finish(self, base, scales, out, begin, head, rank, thread, eps):
        """A warp's row: the sums of squares to and from the cluster, norm and gate. A
        lane has four neighbouring channels of this CTA, if there are so many."""
        row = thread >> 5
        lane = thread & 31
        mine = lane < self.chunks
        channel = QUAD * (self.chunks * rank + lane)
        if not mine:
            channel = Int32(0)
        gates = self.shared(
            base + self.gates_at + LINE_BYTES * row + 2 * channel, BFloat16, QUAD
        )
        place = base + self.outputs_at + VECTOR_BYTES * row + 4 * channel
        o = ptx.load_shared_f32x4(place)
        # A product that is added is an fma: with zero, so that it is rounded.
        square = add_tree([cute.math.fma(x, x, Float32(0.0)) for x in o])
        if const_expr(self.ctas > 1):
            place = base + self.squares_at + SQUARES_BYTES * row
            if mine:
                for peer in cutlass.range_constexpr(self.ctas):
                    ptx.store_remote_f32(
                        place + channel, square, base + SQUARES_FULL, peer
                    )
            ptx.wait_cluster(base + SQUARES_FULL, 0)
            square = self.element(place + 4 * lane)[0]
        mean = cute.math.fma(over_lanes([square])[0], Float32(1.0 / DIM), eps)
        spread = cute.math.rsqrt(mean, fastmath=True)
        if mine:
            line = cute.make_rmem_tensor((QUAD,), BFloat16)
            for i in cutlass.range_constexpr(QUAD):
                scale = ptx.float_from_bits(scales[i])
                gate = sigmoid(gates[i].to(Float32))
                line[i] = (o[i] * spread * scale * gate).to(BFloat16)
            self.store_out(out, begin + row, head, rank, lane, line)

    @cute.jit
    def store_out(self, out, row, head, rank, lane, line):
        """Four channels of a row."""
        at = out.iterator.toint() + Int64(2) * out.stride[0] * row
        at = at + LINE_BYTES * head + 2 * self.channels * rank + 2 * QUAD * lane
        pointer = cute.make_ptr(BFloat16, at, cute.AddressSpace.gmem, assumed_align=8)
        cute.autovec_copy(line, cute.make_tensor(pointer, cute.make_layout(QUAD)))

    @cute.jit
    def record(self, base, window, key, decay, slot, head, width, thread):
        """The taps before row 0 and the rows to the window, keys and decays to their
        records: a part of them by each CTA of the cluster."""
        rank, _, _ = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        begin = THREADS * rank + thread
        step = THREADS * self.ctas
        window_at = window.iterator.toint() + Int64(2) * window.stride[0] * slot
        window_at = window_at + LINE_BYTES * Int64(head)
        place = base + self.lines_at + ENTRY_BYTES * (TAPS - 1 - self.past)
        for i in cutlass.range(begin, 16 * (self.past + width), step, unroll=1):
            entry = i >> 4
            within = 16 * (i & 15)
            at = window_at + Int64(2) * window.stride[1] * entry + within
            from_here = place + ENTRY_BYTES * entry + within
            for kind in cutlass.range_constexpr(3):
                words = ptx.load_shared_128(from_here + LINE_BYTES * kind)
                ptx.store_global_128(at + Int64(LINE_BYTES) * heads * kind, words)
        if const_expr(self.fold):
            for kind, records in ((KEY, key), (DECAY, decay)):
                at = self.slot_of(records, slot) + KIND_BYTES * Int64(head)
                for i in cutlass.range(begin, QUADS * width, step, unroll=1):
                    self.copy(base, kind * KIND_BYTES + 16 * i, at + 16 * i)

    @cute.jit
    def record_changes(self, base, u, slot, head, width, thread):
        """This CTA's channels of u."""
        rank, _, _ = cute.arch.block_idx()
        at = self.slot_of(u, slot) + KIND_BYTES * Int64(head)
        for i in cutlass.range(thread, self.chunks * width, THREADS, unroll=1):
            chunk = self.chunks * rank + (i & (self.chunks - 1))
            offset = VECTOR_BYTES * (i >> self.chunk_bits) + 16 * chunk
            self.copy(base, OLD_U * KIND_BYTES + offset, at + offset)

    @cute.jit
    def count(self, counts, slot, head, width, told):
        """The rows recorded, and an overrun if more were told accepted than that."""
        rank, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        if (thread == 0) & (rank == 0):
            recorded = counts[slot, head, 0]
            if const_expr(self.rolling):
                # After a prompt one is told accepted, and none recorded.
                recorded = cutlass.max(recorded, Int32(1))
            if told > recorded:
                counts[slot, head, 1] = counts[slot, head, 1] + 1
            counts[slot, head, 0] = width

    @cute.jit
    def copy(self, base, offset, address):
        """16 bytes of the vectors to global memory."""
        words = ptx.load_shared_128(base + self.vectors_at + offset)
        ptx.store_global_128(address, words)
