# SPDX-License-Identifier: Apache-2.0
"""The second half: y_m = sum over the experts e that m chose of W2_e h_p, where h_p has
its weight already.

A cluster of two owns 64 latent columns of up to eight rows. The experts that these
chose are dealt out in eight parts by id, four to a CTA; the warps of a part share I. So
nothing is written but y, and the order of a row's sum is fixed by the ids: within a
warp ascending, then the warps of a CTA, then the CTAs.

    lists        the experts of these rows, and each one's pair of each row, in shared
                 memory: everything after it needs them
    ahead        a step is 32 columns of one expert: two blocks of weights, their
                 scales, the pairs' h; the next steps are on their way to shared memory
    multiply     as in up.py, but the eight columns of a product are the rows, with
                 zeros for those that did not choose the expert: the sums stay in
                 registers from expert to expert
    exchange     each CTA takes the other's sums of 32 of the columns; one rounding to
                 bf16

A row's bits are the same whoever is with it: zeros change no sum, and its products do
not depend on the other columns. An expert that rows of several eights chose is read for
each. A row that has an expert twice takes its pairs in turn.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.moe.device import (
    CHUNK,
    PAIRS,
    PITCH,
    ROW_BYTES,
    SCALES_AT,
    SLOT_BYTES,
    TILES,
    TOKENS_AT,
    after,
    product,
    put,
    read_block,
    read_factors,
    word,
)
from verify_kernels.moe.layout import (
    BLOCK_BYTES,
    ROWS,
    STEPS_OF_GROUP,
    filled_columns,
    filled_rows,
)
from verify_kernels.moe.mxfp4 import GROUP

CTAS = 2
#: Parts of the experts in a CTA, and in all.
OWN_PARTS = 4
PARTS = CTAS * OWN_PARTS
#: Columns of a row that one CTA finishes.
HALF = ROWS // CTAS
#: Steps that a warp has room for; all but one are under way.
RING = 3


class ExpertsDownKernel:
    """For up to 64 rows.

    Args:
        latent: L, rows of the second matrix, a multiple of 64.
        inner: I, columns, a multiple of 32.
        experts: E, experts that there are, a multiple of 8.
        top_k: K, a power of two.
        held: columns that the layer has, I and then zeros.
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

    def __init__(self, latent: int, inner: int, experts: int, top_k: int, held: int):
        self.latent = latent
        self.inner = inner
        self.experts = experts
        self.k_bits = top_k.bit_length() - 1
        groups = inner // GROUP
        #: Warps of a part, and steps of an expert that one has.
        self.sharing = next(n for n in (6, 4, 2, 1) if groups % n == 0)
        self.steps = groups // self.sharing
        self.warps = OWN_PARTS * self.sharing
        self.threads = 32 * self.warps
        self.rows = filled_rows(latent)
        self.expert_groups = filled_columns(held) // GROUP
        self.step_bytes = BLOCK_BYTES * (self.rows // ROWS)
        #: Experts that eight rows can have.
        self.most = min(PAIRS * top_k, experts)
        # Shared memory: a barrier; the warps' steps, and their sums once these are
        # done; what the other CTA sends; of the rows' experts each one's pair of each
        # row, the id, how many pairs it has of a row at most, and where they begin and
        # end; all pairs; the warps' counts.
        self.own_at = 16
        self.inbox_at = self.own_at + self.warps * RING * SLOT_BYTES
        self.table_at = self.inbox_at + 4 * PAIRS * HALF
        self.list_at = self.table_at + 4 * PAIRS * self.most
        self.times_at = self.list_at + 4 * self.most
        self.start_at = self.times_at + 4 * self.most
        self.stop_at = self.start_at + 4 * self.most
        self.pairs = MAX_ROWS * top_k
        self.pairs_at = self.stop_at + 4 * self.most
        self.counts_at = self.pairs_at + 4 * self.pairs
        self.shared_bytes = self.counts_at + 4 * self.warps

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [64 K, I]
        words: cute.Tensor,  # int32 [E, I / 16, L / 64, 128], filled up
        scales: cute.Tensor,  # uint8 [E, I / 32, L], filled up
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        out: cute.Tensor,  # bf16 [M, L], rows at any distance
        pdl: Int32,
        stream,
    ):
        self.kernel(x, words, scales, experts, offsets, pairs, counts, out).launch(
            grid=[CTAS * (self.latent // ROWS), (out.shape[0] + PAIRS - 1) // PAIRS, 1],
            block=[self.threads, 1, 1],
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
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        out: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        number, eight, _ = cute.arch.block_idx()
        rank = number & 1
        group = number >> 1
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        first_row = PAIRS * eight
        rows = cutlass.min(out.shape[0] - first_row, PAIRS)
        if thread == 0:
            barrier = cute.make_ptr(
                cutlass.Int64, base, cute.AddressSpace.smem, assumed_align=8
            )
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * HALF * rows)
        cute.arch.cluster_arrive_relaxed()
        for i in cutlass.range(thread, 2 * self.most, self.threads, unroll=1):
            ptx.store_shared_128_if(
                base + self.table_at + 16 * i, Int32(1), (Int32(-1),) * 4
            )
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = self.tabulate(base, experts, offsets, pairs, counts, first_row, thread)
        part = warp // self.sharing
        first_group = (warp - self.sharing * part) * self.steps
        before, own = self.deal(base, used, lane, rank * OWN_PARTS + part)
        at = words.iterator.toint() + BLOCK_BYTES * group + CHUNK * lane
        at = at + STEPS_OF_GROUP * self.step_bytes * first_group
        scales_at = scales.iterator.toint() + ROWS * group + CHUNK * lane
        scales_at = scales_at + self.rows * first_group
        source = x.iterator.toint() + ROW_BYTES * first_group + CHUNK * (lane & 3)
        # 0, which the compiler does not know.
        zero = used >> 31
        self.multiply(
            base, before, own * self.steps, at, scales_at, source, warp, lane, zero,
        )  # fmt: skip
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        self.exchange(base, rows, rank, thread)
        ptx.wait_cluster(base, 0)
        self.store(base, rows, first_row, rank, group, thread, out)

    @cute.jit
    def tabulate(self, base, experts, offsets, pairs, counts, first_row, thread):
        """Of each expert of these rows, ascending, the id, the pair of each row, the
        first if there are several, and how many there are of a row at most. Returns how
        many experts they are."""
        lane = thread & 31
        warp = thread >> 5
        total = counts[0]
        # Ahead of the first barrier, so that all of it is under way at once.
        begin, end, expert = self.expert_at(experts, offsets, thread)
        for i in cutlass.range_constexpr(-(-self.pairs // self.threads)):
            at = self.threads * i + thread
            if at < self.pairs:
                put(base + self.pairs_at + 4 * at, pairs[at])
        cute.arch.sync_threads()
        used = Int32(0)
        for first in cutlass.range(0, total, self.threads, unroll=1):
            index = first + thread
            end = cutlass.select_(index < total, end, begin)
            # Pairs of an expert are there by rows, those of a row side by side.
            start = begin
            stop = begin
            for i in cutlass.range(begin, end, unroll=1):
                row = self.row_at(base, i) - first_row
                start = start + Int32(row < 0)
                stop = stop + Int32(row < PAIRS)
            votes = cute.arch.vote_ballot_sync(start < stop)
            put(base + self.counts_at + 4 * warp, cute.arch.popc(votes))
            cute.arch.sync_threads()
            place = used + cute.arch.popc(votes & ((1 << lane) - 1))
            for w in cutlass.range_constexpr(self.warps):
                count = word(base + self.counts_at + 4 * w)
                place = place + cutlass.select_(w < warp, count, Int32(0))
                used = used + count
            if start < stop:
                last = Int32(-1)
                run = Int32(0)
                most = Int32(1)
                for i in cutlass.range(start, stop, unroll=1):
                    pair = word(base + self.pairs_at + 4 * i)
                    row = self.row_at(base, i) - first_row
                    run = cutlass.select_(row == last, run + 1, Int32(1))
                    most = cutlass.max(most, run)
                    if row != last:
                        put(base + self.table_at + 4 * (PAIRS * place + row), pair)
                    last = row
                put(base + self.list_at + 4 * place, expert)
                put(base + self.times_at + 4 * place, most)
                put(base + self.start_at + 4 * place, start)
                put(base + self.stop_at + 4 * place, stop)
            begin, end, expert = self.expert_at(experts, offsets, index + self.threads)
            cute.arch.sync_threads()
        return used

    @cute.jit
    def expert_at(self, experts, offsets, index):
        """Where the pairs of the ``index``-th distinct expert begin and end, and its
        id; another's if there are not so many experts."""
        index = cutlass.min(index, self.experts - 1)
        return offsets[index], offsets[index + 1], experts[index]

    def row_at(self, base, i):
        """Row of the ``i``-th pair."""
        return word(base + self.pairs_at + 4 * i) >> self.k_bits

    @cute.jit
    def deal(self, base, used, lane, part):
        """Of the ``used`` distinct experts, how many have ids before those of a part of
        all ids, and how many have ids in it."""
        before = Int32(0)
        own = Int32(0)
        bound = part * (self.experts // PARTS)
        for i in cutlass.range(lane, used, 32, unroll=1):
            over = word(base + self.list_at + 4 * i) - bound
            before = before + Int32(over < 0)
            own = own + Int32((over >= 0) & (over < self.experts // PARTS))
        for offset in (16, 8, 4, 2, 1):
            before = before + cute.arch.shuffle_sync_bfly(before, offset=offset)
            own = own + cute.arch.shuffle_sync_bfly(own, offset=offset)
        return before, own

    @cute.jit
    def multiply(self, base, before, steps, at, scales_at, source, warp, lane, zero):
        """A warp's sums, which are left in shared memory."""
        own = base + self.own_at + RING * SLOT_BYTES * warp
        tokens = cute.make_rmem_tensor((4,), Int32)
        total = cute.make_rmem_tensor((4 * TILES,), Float32)
        total.fill(0.0)
        for d in cutlass.range_constexpr(RING - 1):
            self.ask(
                own + SLOT_BYTES * d, base, before, Int32(d), steps, at, scales_at,
                source, lane,
            )  # fmt: skip
        slot = own
        used = own + SLOT_BYTES * (RING - 1)
        for step in cutlass.range(steps, unroll=1):
            ptx.wait_copies(RING - 2)
            cute.arch.sync_warp()
            factors = read_factors(slot, SCALES_AT, lane)
            loaded = ptx.load_shared_128(slot + CHUNK * lane, TOKENS_AT)
            for i in cutlass.range_constexpr(4):
                tokens[i] = loaded[i]
            # The step before has been multiplied when its sums are there.
            self.ask(
                used + after(self.sums_of(total), zero), base, before, step + RING - 1,
                steps, at, scales_at, source, lane,
            )  # fmt: skip
            index = before + step // self.steps
            times = word(base + self.times_at + 4 * index)
            for time in cutlass.range(times, unroll=1):
                if time > 0:
                    pair = self.later_pair(base, index, time, lane)
                    row = self.row_of(source, pair, step)
                    loaded = ptx.load_global_128_if(
                        row, Int32(pair >= 0), 0, (Int32(0),) * 4
                    )
                    for i in cutlass.range_constexpr(4):
                        tokens[i] = loaded[i]
                acc = self.sums_of(total)
                for b in cutlass.range_constexpr(STEPS_OF_GROUP):
                    h = (tokens[2 * b], tokens[2 * b + 1])
                    block = read_block(slot, BLOCK_BYTES * b, lane)
                    acc = product(acc, block, h, factors)
                for j in cutlass.range_constexpr(TILES):
                    for i in cutlass.range_constexpr(4):
                        total[4 * j + i] = acc[j][i]
            used = slot
            slot = slot + SLOT_BYTES
            slot = cutlass.select_(slot == own + SLOT_BYTES * RING, own, slot)
        cute.arch.sync_warp()
        sums = own + 4 * (lane >> 2)
        for j in cutlass.range_constexpr(TILES):
            for i in cutlass.range_constexpr(4):
                token = 2 * (lane & 3) + i % 2
                to = sums + 4 * PITCH * token + 4 * (16 * j + 8 * (i // 2))
                ptx.store_shared_f32(to, total[4 * j + i])

    def sums_of(self, total):
        """Four sums of each tile."""
        return [tuple(total[4 * j + i] for i in range(4)) for j in range(TILES)]

    @cute.jit
    def ask(self, to, base, before, step, steps, at, scales_at, source, lane):
        """Copies of a step, if there is such a step."""
        live = Int32(step < steps)
        step = cutlass.select_(step < steps, step, Int32(0))
        index = cutlass.select_(steps > 0, before + step // self.steps, Int32(0))
        expert = word(base + self.list_at + 4 * index)
        group = expert * self.expert_groups + step % self.steps
        words_at = at + Int64(STEPS_OF_GROUP * self.step_bytes) * group
        mine = to + CHUNK * lane
        for b in cutlass.range_constexpr(STEPS_OF_GROUP):
            ptx.copy_async_128_if(
                mine, words_at, live, BLOCK_BYTES * b, self.step_bytes * b
            )
        pair = word(base + self.table_at + 4 * (PAIRS * index + (lane >> 2)))
        row = self.row_of(source, pair, step)
        size = cutlass.select_(pair >= 0, Int32(CHUNK), Int32(0))
        ptx.copy_async_128_if(mine, row, live, TOKENS_AT, size=size)
        exponents_at = scales_at + Int64(self.rows) * group
        live = live & Int32(lane < ROWS // CHUNK)
        ptx.copy_async_128_if(mine, exponents_at, live, SCALES_AT)
        ptx.commit_copies()

    @cute.jit
    def later_pair(self, base, index, time, lane):
        """The pair of this lane's row and an expert behind ``time`` others, or -1."""
        found = Int32(-1)
        seen = Int32(0)
        first = word(base + self.table_at + 4 * (PAIRS * index + (lane >> 2)))
        start = word(base + self.start_at + 4 * index)
        stop = word(base + self.stop_at + 4 * index)
        for i in cutlass.range(start, stop, unroll=1):
            if (first >= 0) & (self.row_at(base, i) == (first >> self.k_bits)):
                pair = word(base + self.pairs_at + 4 * i)
                found = cutlass.select_(seen == time, pair, found)
                seen = seen + 1
        return found

    @cute.jit
    def row_of(self, source, pair, step):
        """Where this lane's part of a pair's h of a step begins."""
        at = source + Int64(2 * self.inner) * cutlass.max(pair, Int32(0))
        return at + ROW_BYTES * (step % self.steps)

    def total(self, base, token, quad):
        """The warps' sums of four columns of a row, in order."""
        at = base + self.own_at + 4 * PITCH * token + 16 * quad
        value = ptx.load_shared_f32x4(at)
        for w in range(1, self.warps):
            part = ptx.load_shared_f32x4(at, RING * SLOT_BYTES * w)
            value = tuple(a + b for a, b in zip(value, part, strict=True))
        return value

    @cute.jit
    def exchange(self, base, rows, rank, thread):
        """Sends the other CTA the sums of its columns."""
        other = 1 - rank
        for i in cutlass.range(thread, rows * (HALF // 4), self.threads, unroll=1):
            token = i // (HALF // 4)
            quad = i % (HALF // 4)
            value = self.total(base, token, other * (HALF // 4) + quad)
            there = base + self.inbox_at + 4 * HALF * token + 16 * quad
            ptx.store_remote_f32x4(there, value, base, other)

    @cute.jit
    def store(self, base, rows, first_row, rank, group, thread, out):
        """Both CTAs' sums of this one's columns."""
        for i in cutlass.range(thread, rows * (HALF // 4), self.threads, unroll=1):
            token = i // (HALF // 4)
            quad = i % (HALF // 4)
            own = self.total(base, token, rank * (HALF // 4) + quad)
            there = base + self.inbox_at + 4 * HALF * token + 16 * quad
            other = ptx.load_shared_f32x4(there)
            # Of two numbers the sum is the same in either order.
            column = ROWS * group + HALF * rank + 4 * quad
            for j in cutlass.range_constexpr(4):
                out[first_row + token, column + j] = (own[j] + other[j]).to(BFloat16)
