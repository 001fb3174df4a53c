# SPDX-License-Identifier: Apache-2.0
"""The first half of the experts: h_p = w_p SiTU(W1_e z_m, W3_e z_m) of each pair p.

A pair is a row m and one of the experts e that it chose (`ExpertPlan`), w_p its weight.
An item of work is 64 rows of gate and the same of up, of one distinct expert, for all
rows that chose it. Clusters of two take items in turn: CTA 0 has the rows of gate, CTA
1 those of up. The 8 warps of a CTA share K. A turn is an item and eight of its pairs.

    ahead        a warp's next groups, of 32 columns each, are on their way to its
                 shared memory: two blocks of weights, their scales, the pairs' rows
    multiply     weights become bf16 in registers and are the 16-row operands of
                 m16n8k16, the pairs the 8 columns
    add          the warps' sums meet in shared memory and are added in the order of K,
                 a warp a pair
    exchange     CTA 0 takes the sums of up of four pairs, CTA 1 those of gate of the
                 other four
    a turn later SiTU, times w_p; one rounding to bf16

Asynchronous copies and not loads into registers: with two CTAs an SM there are none to
spare, and loads are told apart by six counters (`skinny_gemm.wide_staged`). A column
without a pair copies nothing and holds zeros, or what was there before: no column of a
product depends on another. Eight times the only pair's row, copied by all CTAs, took
longer than the weights.

An expert with more than eight pairs is read again, from L2. A pair's bits depend on its
row and expert alone: K is cut the same way for all. h lies in the order of
`layout.place_of`.

What a CTA sends in a turn goes to one of two places in turn, and is waited for in the
next turn, in front of its barrier. So a CTA that sends knows that the place is free: in
turn t it has what the other one sent in t - 1, behind a barrier that came after the
other one had read what was there from t - 2.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.moe.device import (
    CHUNK,
    PAIRS,
    ROW_BYTES,
    TILES,
    Plan,
    after,
    clear,
    hidden_zero,
    no_sums,
    product,
    read_block,
    read_factors,
    situ,
)
from verify_kernels.moe.experts import CTAS_PER_SM
from verify_kernels.moe.layout import (
    BLOCK_BYTES,
    COLUMNS,
    ROWS,
    STEPS_OF_GROUP,
    filled_columns,
    filled_rows,
)

#: Of a CTA.
WARPS = 8
THREADS = 32 * WARPS
#: Dynamic shared memory of which an SM has no two.
HALF_SHARED = 116 * 1024
#: A group in shared memory: two blocks of weights, the pairs' rows, the scales.
TOKENS_AT = BLOCK_BYTES * STEPS_OF_GROUP
SCALES_AT = TOKENS_AT + PAIRS * ROW_BYTES
SLOT_BYTES = SCALES_AT + ROWS
#: Of the sums of a pair, in floats: lanes of a store, and quads of a load, meet all
#: banks.
PITCH = ROWS + 4
#: Of a warp's sums.
AREA = 4 * PAIRS * PITCH
#: Of a place for what the other CTA sends.
INBOX = 4 * ROWS * PAIRS // 2
#: Warps that send.
SENDERS = PAIRS // 2
#: Of a pair's row along a block.
CHUNKS_OF_BLOCK = 2 * COLUMNS // CHUNK


class ExpertsUpKernel:
    """For any number of rows and experts.

    Args:
        latent: L, columns of the input, a multiple of 256 up to 3584, or 128.
        inner: I, rows of gate and of up, a multiple of 64.
        experts: E, experts that there are.
        top_k: K, a power of two.
        held: rows of each that the layer has, I and then zeros, a multiple of 64.
        alone: one CTA has an SM, for steps whose items are not more than that. Where
            SMs are still busy with the kernel before two could be given one, others
            none: 12.5 us instead of 8.9 for 48 items of K3 (H200, 2026-11-30).
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
        "weights",
        "out",
    )
    early_loads = ()

    def __init__(
        self,
        latent: int,
        inner: int,
        experts: int,
        top_k: int,
        held: int,
        *,
        alone: bool = False,
    ):
        self.inner = inner
        self.k_bits = top_k.bit_length() - 1
        #: Blocks of a warp along K, and groups; a lone block is half of one.
        self.steps = latent // COLUMNS // WARPS
        self.blocks_of_group = min(STEPS_OF_GROUP, self.steps)
        self.groups = self.steps // self.blocks_of_group
        #: Groups that there is room for: of K3's fourteen seven, 7 KB of weights a
        #: warp, half of which has to be under way. They divide all groups, so that each
        #: has the same place in every turn. A place is asked for anew one group later,
        #: or if it is the only one, at once.
        self.ring = max(
            n for n in range(1, max(self.groups // 2, 1) + 1) if self.groups % n == 0
        )
        self.lag = min(self.ring - 1, 1)
        self.blocks = inner // ROWS
        #: Where up begins.
        self.up_block = held // ROWS
        #: Of both matrices, and of K.
        self.rows = filled_rows(2 * held)
        self.expert_steps = filled_columns(latent) // COLUMNS
        self.step_bytes = BLOCK_BYTES * (self.rows // ROWS)
        # Shared memory: two barriers; the warps' groups; the warps' sums; two places
        # for the other CTA's; the plan.
        self.groups_at = 16
        self.areas_at = self.groups_at + WARPS * SLOT_BYTES * self.ring
        self.inbox_at = self.areas_at + WARPS * AREA
        pairs = MAX_ROWS * top_k
        self.plan = Plan(self.inbox_at + 2 * INBOX, experts, pairs, THREADS)
        self.shared_bytes = self.plan.end
        self.ctas_per_sm = CTAS_PER_SM
        if alone:
            self.ctas_per_sm = 1
            self.shared_bytes = max(self.shared_bytes, HALF_SHARED)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [M, L], rows at any multiple of 16 bytes
        words: cute.Tensor,  # int32 [E, L / 16, 2 I / 64, 128], filled up
        scales: cute.Tensor,  # uint8 [E, L / 32, 2 I], filled up
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        weights: cute.Tensor,  # fp32 [M, K]
        out: cute.Tensor,  # bf16 [64 K, I]
        beta: Float32,
        linear: Float32,
        clusters: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            x,
            words,
            scales,
            experts,
            offsets,
            pairs,
            counts,
            weights,
            out,
            beta,
            linear,
        ).launch(
            grid=[2 * clusters, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[2, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=self.ctas_per_sm,
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
        weights: cute.Tensor,
        out: cute.Tensor,
        beta: Float32,
        linear: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rank = number & 1
        first = number >> 1
        step = ctas >> 1
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(self.barrier(base + 8 * i), SENDERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        to = base + self.groups_at + SLOT_BYTES * self.ring * warp
        for slot in cutlass.range_constexpr(self.ring):
            clear(to + SLOT_BYTES * slot + TOKENS_AT, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = counts[0]
        self.plan.copy(base, (experts, offsets, pairs), thread)
        cute.arch.sync_threads()
        items = used * self.blocks
        zero = hidden_zero(used)
        there = first < items
        at, scales_at, begin, count = self.place(
            base, words, scales, first, there, rank, warp, lane
        )
        row, paired = self.row_of(base, x, begin, count, Int32(0), warp, lane)
        for q in cutlass.range_constexpr(self.ring - self.lag):
            self.request(to, q, q, at, scales_at, row, paired, Int32(there), lane)
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        turn = Int32(0)
        # Of the turn before: this thread's sums, its pair or -1, its share, where its h
        # goes.
        own = cute.make_rmem_tensor((4,), Float32)
        own.fill(0.0)
        pair = Int32(-1)
        share = Float32(0.0)
        h_at = Int64(0)
        for item in cutlass.range(first, items, step, unroll=1):
            there = item + step < items
            next_at, next_scales_at, next_begin, next_count = self.place(
                base, words, scales, item + step, there, rank, warp, lane
            )
            block = Int32(Uint32(item) % Uint32(self.blocks))
            for column in cutlass.range(0, count, PAIRS, unroll=1):
                # Next come the other pairs of this item, or the next one.
                again = column + PAIRS < count
                next_row, next_paired = self.row_of(
                    base,
                    x,
                    cutlass.select_(again, begin, next_begin),
                    cutlass.select_(again, count, next_count),
                    cutlass.select_(again, column + PAIRS, Int32(0)),
                    warp,
                    lane,
                )
                acc = self.multiply(
                    to, at, scales_at, row, paired,
                    cutlass.select_(again, at, next_at),
                    cutlass.select_(again, scales_at, next_scales_at), next_row,
                    next_paired, Int32(there | again), zero, lane,
                )  # fmt: skip
                if turn > 0:
                    self.finish(
                        base, turn - 1, own, pair, share, h_at, rank, lane, warp, out,
                        beta, linear,
                    )  # fmt: skip
                # All have added what was there before.
                cute.arch.sync_threads()
                self.leave(acc, base + self.areas_at + AREA * warp, lane)
                cute.arch.sync_threads()
                self.add(base, turn & 1, own, rank, lane, warp)
                mine = column + warp
                pair = self.plan.pair(base, begin + cutlass.min(mine, count - 1))
                share = weights[pair >> self.k_bits, pair & ((1 << self.k_bits) - 1)]
                h_at = Int64(pair) * self.inner + ROWS * block
                pair = cutlass.select_(mine < count, pair, Int32(-1))
                turn = turn + 1
                row = next_row
                paired = next_paired
            at = next_at
            scales_at = next_scales_at
            begin = next_begin
            count = next_count
        if turn > 0:
            self.finish(
                base, turn - 1, own, pair, share, h_at, rank, lane, warp, out, beta,
                linear,
            )  # fmt: skip

    def barrier(self, address):
        return cute.make_ptr(
            cutlass.Int64, address, cute.AddressSpace.smem, assumed_align=8
        )

    @cute.jit
    def place(self, base, words, scales, item, there, rank, warp, lane):
        """Where a lane's blocks and scales of an item begin, and where its pairs begin
        and how many they are; those of another if that is not there."""
        item = cutlass.select_(there, item, Int32(0))
        index = Int32(Uint32(item) // Uint32(self.blocks))
        expert = self.plan.expert(base, index)
        begin, count = self.plan.pairs_of(base, index)
        block = item - index * self.blocks + self.up_block * rank
        step = Int64(expert) * self.expert_steps + self.steps * warp
        at = words.iterator.toint() + self.step_bytes * step
        at = at + BLOCK_BYTES * block + CHUNK * lane
        # With one block a warp two warps share a group.
        scales_at = scales.iterator.toint() + self.rows * (step >> 1)
        return at, scales_at + ROWS * block + CHUNK * lane, begin, count

    @cute.jit
    def row_of(self, base, x, begin, count, column, warp, lane):
        """Where this lane's part of a pair's row begins, of an item's eight pairs from
        ``column`` on, and whether there is such a pair."""
        mine = column + (lane >> 2)
        there = mine < count
        pair = self.plan.pair(base, begin + cutlass.select_(there, mine, Int32(0)))
        row = Int64(2) * x.stride[0] * (cutlass.max(pair, Int32(0)) >> self.k_bits)
        row = x.iterator.toint() + row + 2 * COLUMNS * self.steps * warp
        return row + CHUNK * (lane & 3), Int32(there)

    @cute.jit
    def request(
        self, to, slot: cutlass.Constexpr, q: cutlass.Constexpr, at, scales_at, row,
        paired, live, lane,
    ):  # fmt: skip
        """Copies of the q-th group of an item, if it is there."""
        place = SLOT_BYTES * slot
        for b in cutlass.range_constexpr(self.blocks_of_group):
            step = self.blocks_of_group * q + b
            ptx.copy_async_128_if(
                to + CHUNK * lane, at, live, place + BLOCK_BYTES * b,
                self.step_bytes * step,
            )  # fmt: skip
        own = live & paired
        if cutlass.const_expr(self.blocks_of_group < STEPS_OF_GROUP):
            own = own & Int32((lane & 3) < CHUNKS_OF_BLOCK)
        # Chunks change places, so that the rows of a matrix meet all banks.
        g = lane >> 2
        token = to + ROW_BYTES * g + CHUNK * ((lane & 3) ^ ((g >> 1) & 3))
        ptx.copy_async_128_if(token, row, own, place + TOKENS_AT, ROW_BYTES * q)
        own = live & Int32(lane < ROWS // CHUNK)
        ptx.copy_async_128_if(
            to + CHUNK * lane, scales_at, own, place + SCALES_AT, self.rows * q
        )
        ptx.commit_copies()

    @cute.jit
    def multiply(
        self, to, at, scales_at, row, paired, next_at, next_scales_at, next_row,
        next_paired, more, zero, lane,
    ):  # fmt: skip
        """This warp's sums of eight pairs. A group that was used makes way for a later
        one, or if there is more to multiply, one of the first of that."""
        acc = no_sums()
        r = lane & 7
        token = to + ROW_BYTES * r + CHUNK * ((lane >> 3) ^ ((r >> 1) & 3))
        free = to
        for q in cutlass.range_constexpr(self.groups):
            place = SLOT_BYTES * (q % self.ring)
            ptx.wait_copies(self.ring - 1 - self.lag)
            cute.arch.sync_warp()
            tokens = ptx.load_matrices(
                token, place + TOKENS_AT, CHUNKS_OF_BLOCK * self.blocks_of_group
            )
            factors = read_factors(to, place + SCALES_AT, lane)
            blocks = [
                read_block(to, place + BLOCK_BYTES * b, lane)
                for b in range(self.blocks_of_group)
            ]
            if cutlass.const_expr(self.lag == 1):
                self.ask(
                    free, q, at, scales_at, row, paired, next_at, next_scales_at,
                    next_row, next_paired, more, lane,
                )  # fmt: skip
            for b in cutlass.range_constexpr(self.blocks_of_group):
                acc = product(acc, blocks[b], tokens[2 * b : 2 * b + 2], factors)
            # The place is free when the products are there, which need what was read.
            free = to + after(acc, zero)
            if cutlass.const_expr(self.lag == 0):
                # What other lanes have read they have multiplied, for all multiply
                # together; racecheck does not know that.
                cute.arch.sync_warp()
                self.ask(
                    free, q, at, scales_at, row, paired, next_at, next_scales_at,
                    next_row, next_paired, more, lane,
                )  # fmt: skip
        return acc

    @cute.jit
    def ask(
        self, free, q: cutlass.Constexpr, at, scales_at, row, paired, next_at,
        next_scales_at, next_row, next_paired, more, lane,
    ):  # fmt: skip
        """Copies to the place that is free in the q-th group's turn."""
        new = q - self.lag + self.ring
        slot = new % self.ring
        if cutlass.const_expr(new < self.groups):
            self.request(free, slot, new, at, scales_at, row, paired, Int32(1), lane)
        else:
            self.request(
                free, slot, new - self.groups, next_at, next_scales_at, next_row,
                next_paired, more, lane,
            )  # fmt: skip

    def leave(self, acc, area, lane):
        """A warp's sums to shared memory, [pair, row]."""
        for j in range(TILES):
            for i in range(4):
                row = 16 * j + (lane >> 2) + 8 * (i // 2)
                place = area + 4 * (PITCH * (2 * (lane & 3) + i % 2) + row)
                ptx.store_shared_f32(place, acc[j][i])

    @cute.jit
    def add(self, base, buffer, own, rank, lane, warp):
        """This warp's pair: a lane adds four rows' sums, which stay here or go to the
        other CTA."""
        if lane < ROWS // 4:
            at = base + self.areas_at + 4 * PITCH * warp + 16 * lane
            value = ptx.load_shared_f32x4(at)
            for w in cutlass.range_constexpr(1, WARPS):
                part = ptx.load_shared_f32x4(at, AREA * w)
                value = tuple(a + b for a, b in zip(value, part, strict=True))
            if (warp >> 2) != rank:
                barrier = base + 8 * buffer
                there = base + self.inbox_at + INBOX * buffer
                there = there + 4 * ROWS * (warp & 3) + 16 * lane
                ptx.store_remote_f32x4(there, value, barrier, 1 - rank)
                if lane == 0:
                    ptx.arrive_remote_expecting(barrier, 1 - rank, INBOX // SENDERS)
            for i in cutlass.range_constexpr(4):
                own[i] = value[i]

    @cute.jit
    def finish(
        self, base, turn, own, pair, share, h_at, rank, lane, warp, out, beta, linear
    ):
        """Four rows of a pair of a turn: this CTA's sums, the other's, h."""
        if (warp >> 2) == rank:
            buffer = turn & 1
            barrier = self.barrier(base + 8 * buffer)
            # Not acquired for the cluster, which would empty L1.
            cute.arch.mbarrier_wait(barrier, (turn >> 1) & 1)
            if (lane < ROWS // 4) & (pair >= 0):
                there = base + self.inbox_at + INBOX * buffer
                there = there + 4 * ROWS * (warp & 3) + 16 * lane
                other = ptx.load_shared_f32x4(there)
                is_gate = rank == 0
                h = []
                for i in cutlass.range_constexpr(4):
                    gate = cutlass.select_(is_gate, own[i], other[i])
                    up = cutlass.select_(is_gate, other[i], own[i])
                    h.append(share * situ(gate, up, beta, linear))
                # Rows 4 q .. 4 q + 3 of a block are two pairs of columns to the next
                # kernel, those of lanes 2 (q & 1) and the one behind.
                at = h_at + 32 * (lane >> 3) + 16 * (lane & 1)
                at = at + (lane & 4) + (lane & 2)
                for i in cutlass.range_constexpr(2):
                    pointer = cute.make_ptr(
                        Int32,
                        out.iterator.toint() + 2 * (at + 8 * i),
                        cute.AddressSpace.gmem,
                        assumed_align=4,
                    )
                    two = ptx.pack_bf16x2(h[2 * i], h[2 * i + 1])
                    cute.make_tensor(pointer, cute.make_layout(1))[0] = two
