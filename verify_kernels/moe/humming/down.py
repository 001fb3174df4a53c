# SPDX-License-Identifier: Apache-2.0
"""The second half: y_m = sum over the experts e that m chose of W2_e h_p, where h_p has
its weight already.

A cluster of two owns 64 latent columns of all rows. The experts are dealt out in four
parts by id, two to a CTA; the warps of a part share I. So a weight is read once,
nothing is written but y, and the order of the sum is fixed by the ids: within a warp
ascending, then the warps of a CTA, then the CTAs.

    lists        the distinct experts and their pairs, in shared memory: everything
                 after it needs them
    ahead        a step is a group of 32 columns of one expert, or two; the next steps
                 are on their way
    multiply     as in up.py, into sums that pass from expert to expert
    exchange     each CTA takes the other's sums of 32 of the columns; one rounding to
                 bf16

Up to `NARROW` rows the eight columns of a product are the rows themselves, with zeros
for those that did not choose the expert; the sums stay in registers, and what is on its
way goes to shared memory, as in up.py. For more rows the columns are the expert's
pairs, the sums of their rows come from the warp's shared memory and return there, which
leaves no room: weights on their way have registers. The bits are the same: zeros change
no sum, and a row's products do not depend on the other columns. A row that has an
expert twice takes its pairs in turn.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from verify_kernels.common import ptx
from verify_kernels.moe.device import PAIRS, no_words, put, stage, word
from verify_kernels.moe.humming.device import (
    TILES,
    after,
    factors,
    product,
    read_block,
    read_scales,
    request,
    request_scales,
    words_of,
)
from verify_kernels.moe.humming.layout import (
    BLOCK_BYTES,
    ROWS,
    STEPS_OF_GROUP,
    filled_columns,
    filled_rows,
)
from verify_kernels.moe.mxfp4 import GROUP

CTAS = 2
#: Parts of the experts in a CTA, and in all.
HALVES = 2
PARTS = CTAS * HALVES
#: Rows up to which the sums are in registers.
NARROW = PAIRS
#: Between the sums of two rows, in floats: lanes of a product meet few banks twice.
PITCH = ROWS + 4
#: Columns of a row that one CTA finishes.
HALF = ROWS // CTAS
#: Of h that a lane reads for a group: eight numbers.
READ_BYTES = 16
#: Steps that a warp has room for up to 8 rows; all but one are under way. As large as a
#: CTA of up.py that still runs leaves room for.
RING = 5
#: A step in shared memory: weights, h, scales.
TOKENS_AT = BLOCK_BYTES * STEPS_OF_GROUP
SCALES_AT = TOKENS_AT + 32 * READ_BYTES
SLOT_BYTES = SCALES_AT + ROWS


def cut_of(inner: int) -> tuple[int, int]:
    """Warps that share I, and the groups of a step of many rows."""
    groups = inner // GROUP
    warps = next(n for n in (6, 4, 2, 1) if groups % n == 0)
    return warps, 2 if groups // warps % 2 == 0 else 1


class ExpertsDownKernel:
    """For up to 8 rows or for any number.

    Args:
        latent: L, rows of the second matrix, a multiple of 64.
        inner: I, columns, a multiple of 32.
        experts: E, experts that there are, a multiple of 4.
        top_k: K, a power of two.
        held: columns that the layer has, I and then zeros.
        most: rows, `NARROW` or `MAX_ROWS`.
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

    def __init__(
        self, latent: int, inner: int, experts: int, top_k: int, held: int, most: int
    ):
        self.latent = latent
        self.inner = inner
        self.experts = experts
        self.k_bits = top_k.bit_length() - 1
        self.narrow = most <= NARROW
        self.most = most
        #: Warps of a part, and the groups of a step of theirs.
        self.sharing, self.groups = cut_of(inner)
        if self.narrow:
            self.groups = 1
        self.warps = HALVES * self.sharing
        self.threads = 32 * self.warps
        self.blocks = STEPS_OF_GROUP * self.groups
        #: Groups of a warp, and steps of an expert.
        self.own_groups = inner // GROUP // self.sharing
        self.chunks = self.own_groups // self.groups
        #: Steps whose weights are on their way: eight blocks.
        self.depth = 4 // self.groups
        self.rows = filled_rows(latent)
        self.expert_groups = filled_columns(held) // GROUP
        self.step_bytes = BLOCK_BYTES * (self.rows // ROWS)
        #: Of a warp: its sums, and up to 8 rows before them its steps.
        self.own_bytes = RING * SLOT_BYTES if self.narrow else 4 * most * PITCH
        # Shared memory: a barrier; the warps' own; what the other CTA sends; up to 8
        # rows each expert's pair of each row; the distinct experts, where their pairs
        # begin, the pairs; up to 8 rows the most pairs that an expert has of one.
        self.pairs_most = most * top_k
        self.own_at = 16
        self.inbox_at = self.own_at + self.warps * self.own_bytes
        self.table_at = self.inbox_at + 4 * most * HALF
        table_bytes = 4 * NARROW * self.pairs_most if self.narrow else 0
        self.list_at = self.table_at + table_bytes
        self.offsets_at = self.list_at + 4 * experts
        self.pairs_at = self.offsets_at + 4 * (experts + 1)
        self.times_at = self.pairs_at + 4 * self.pairs_most
        times_bytes = 4 * self.pairs_most if self.narrow else 0
        self.shared_bytes = self.times_at + times_bytes

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
            grid=[CTAS * (self.latent // ROWS), 1, 1],
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
        stage(base + self.list_at, experts, self.experts, thread, self.threads)
        stage(base + self.offsets_at, offsets, self.experts + 1, thread, self.threads)
        stage(base + self.pairs_at, pairs, self.pairs_most, thread, self.threads)
        if cutlass.const_expr(self.narrow):
            for i in cutlass.range(thread, 2 * self.pairs_most, self.threads, unroll=1):
                ptx.store_shared_128_if(
                    base + self.table_at + 16 * i, Int32(1), (Int32(-1),) * 4
                )
            cute.arch.sync_threads()
            self.tabulate(base, used, thread)
        else:
            sums = base + self.own_at + self.own_bytes * warp
            for i in cutlass.range(lane, rows * (PITCH // 4), 32, unroll=1):
                ptx.store_shared_128_if(sums + 16 * i, Int32(1), no_words())
        cute.arch.sync_threads()

        half = Int32(warp >= self.sharing)
        first_group = (warp - self.sharing * half) * self.own_groups
        before, own = self.deal(base, used, lane, rank * HALVES + half)
        steps = own * self.chunks
        at = words.iterator.toint() + BLOCK_BYTES * group + 16 * lane
        at = at + STEPS_OF_GROUP * self.step_bytes * first_group
        scales_at = scales.iterator.toint() + ROWS * group
        scales_at = scales_at + self.rows * first_group
        source = x.iterator.toint() + 2 * GROUP * first_group + READ_BYTES * (lane & 3)
        if cutlass.const_expr(self.narrow):
            # 0, which the compiler does not know.
            zero = used >> 31
            self.multiply_rows(
                base, before, steps, at, scales_at + 16 * lane, source, warp, lane, zero
            )
        else:
            scales_at = scales_at + 8 * (lane >> 2)
            self.multiply_pairs(base, before, steps, at, scales_at, source, warp, lane)
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        self.exchange(base, rows, rank, thread)
        ptx.wait_cluster(base, 0)
        self.store(base, rows, rank, group, thread, out)

    @cute.jit
    def tabulate(self, base, used, thread):
        """Of each distinct expert the pair of each row, the first if there are several,
        and how many pairs it has of a row at most."""
        for index in cutlass.range(thread, used, self.threads, unroll=1):
            begin = word(base + self.offsets_at + 4 * index)
            end = word(base + self.offsets_at + 4 * index + 4)
            table = base + self.table_at + 4 * NARROW * index
            last = Int32(-1)
            run = Int32(0)
            most = Int32(1)
            for i in cutlass.range(begin, end, unroll=1):
                pair = word(base + self.pairs_at + 4 * i)
                row = pair >> self.k_bits
                # Pairs of a row lie side by side.
                run = cutlass.select_(row == last, run + 1, Int32(1))
                most = cutlass.max(most, run)
                if row != last:
                    put(table + 4 * row, pair)
                last = row
            put(base + self.times_at + 4 * index, most)

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
    def multiply_rows(
        self, base, before, steps, at, scales_at, source, warp, lane, zero
    ):
        """A warp's sums of up to eight rows, which are left in shared memory."""
        own = base + self.own_at + self.own_bytes * warp
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
            blocks = [
                read_block(slot, BLOCK_BYTES * b, lane) for b in range(STEPS_OF_GROUP)
            ]
            scales = factors(read_scales(slot, SCALES_AT, lane), 0)
            loaded = ptx.load_shared_128(slot + READ_BYTES * lane, TOKENS_AT)
            for i in cutlass.range_constexpr(4):
                tokens[i] = loaded[i]
            # The step before has been multiplied when its sums are there.
            acc = self.sums_of(total)
            self.ask(
                used + after(acc, zero), base, before, step + RING - 1, steps, at,
                scales_at, source, lane,
            )  # fmt: skip
            index = before + step // self.chunks
            times = word(base + self.times_at + 4 * index)
            for time in cutlass.range(times, unroll=1):
                if time > 0:
                    again = self.later_pair(base, index, time, lane)
                    row = self.row_of(source, again, step)
                    self.fetch(tokens, row, Int32(again >= 0))
                acc = self.sums_of(total)
                for b in cutlass.range_constexpr(STEPS_OF_GROUP):
                    h = (tokens[2 * b], tokens[2 * b + 1])
                    acc = product(acc, blocks[b], h, scales)
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
        """Copies of a step of up to eight rows, if there is such a step."""
        live = Int32(step < steps)
        words_at, exponents_at = self.place(base, before, step, steps, at, scales_at)
        mine = to + READ_BYTES * lane
        for b in cutlass.range_constexpr(STEPS_OF_GROUP):
            ptx.copy_async_128_if(
                mine, words_at, live, BLOCK_BYTES * b, self.step_bytes * b
            )
        pair = self.pair_of(base, before, step, steps, lane)
        row = self.row_of(source, pair, step)
        size = cutlass.select_(pair >= 0, Int32(READ_BYTES), Int32(0))
        ptx.copy_async_128_if(mine, row, live, TOKENS_AT, size=size)
        live = live & Int32(lane < ROWS // READ_BYTES)
        ptx.copy_async_128_if(mine, exponents_at, live, SCALES_AT)
        ptx.commit_copies()

    @cute.jit
    def multiply_pairs(self, base, before, steps, at, scales_at, source, warp, lane):
        """A warp's sums of any number of rows, in shared memory."""
        held, exponents = self.registers()
        tokens = cute.make_rmem_tensor((4 * self.groups,), Int32)
        sums = base + self.own_at + self.own_bytes * warp + 4 * (lane >> 2)
        for d in cutlass.range_constexpr(self.depth):
            self.start(held[d], exponents[d], base, before, d, steps, at, scales_at)
        pair = self.column(base, before, Int32(0), Int32(0), steps, lane)
        self.fetch(tokens, self.row_of(source, pair, Int32(0)), Int32(pair >= 0))
        for first in cutlass.range(0, steps, self.depth, unroll=1):
            for d in cutlass.range_constexpr(self.depth):
                step = first + d
                if step < steps:
                    then = step + self.depth
                    to, scales_to = self.place(base, before, then, steps, at, scales_at)
                    index = before + step // self.chunks
                    begin = word(base + self.offsets_at + 4 * index)
                    count = word(base + self.offsets_at + 4 * index + 4) - begin
                    for column in cutlass.range(0, count, PAIRS, unroll=1):
                        # Next come this expert's other pairs, or the next step.
                        again = column + PAIRS < count
                        next_pair = self.column(
                            base,
                            before,
                            cutlass.select_(again, step, step + 1),
                            cutlass.select_(again, column + PAIRS, Int32(0)),
                            steps,
                            lane,
                        )
                        # If a row is there twice each column has a turn.
                        row = cutlass.select_(pair >= 0, pair >> self.k_bits, Int32(-1))
                        beside = cute.arch.shuffle_sync_up(row, offset=4)
                        twice = (row == beside) & (row >= 0) & (lane >= 4)
                        several = cute.arch.vote_any_sync(twice)
                        turns = cutlass.select_(several, Int32(PAIRS), Int32(1))
                        for turn in cutlass.range(turns, unroll=1):
                            last = turn + 1 == turns
                            if several:
                                own = (lane >> 2) == turn
                                self.fetch(
                                    tokens,
                                    self.row_of(source, pair, step),
                                    Int32(own & (pair >= 0)),
                                )
                            goes = Int32((then < steps) & last & ~again)
                            acc = self.load(sums, row, lane)
                            acc = self.multiply(
                                acc, held[d], exponents[d], tokens, to, scales_to, goes
                            )
                            self.leave(sums, row, acc, several, turn, lane)
                        pair = next_pair
                        self.fetch(
                            tokens,
                            self.row_of(
                                source, pair, cutlass.select_(again, step, step + 1)
                            ),
                            Int32(pair >= 0),
                        )

    def registers(self):
        """For the weights and scales of the steps under way."""
        words = 4 * self.blocks
        held = [cute.make_rmem_tensor((words,), Int32) for _ in range(self.depth)]
        exponents = [
            cute.make_rmem_tensor((2 * self.groups,), Int32) for _ in range(self.depth)
        ]
        return held, exponents

    @cute.jit
    def start(
        self, held, exponents, base, before, step: cutlass.Constexpr, steps, at,
        scales_at,
    ):  # fmt: skip
        """Requests a step's weights and scales, if there is such a step."""
        live = Int32(Int32(step) < steps)
        to, scales_to = self.place(base, before, Int32(step), steps, at, scales_at)
        for t in cutlass.range_constexpr(self.blocks):
            request(held, t, to, self.step_bytes * t, live, ())
        for t in cutlass.range_constexpr(self.groups):
            request_scales(exponents, t, scales_to, self.rows * t, live, ())

    @cute.jit
    def expert_of(self, before, step, steps):
        """Number among the distinct experts of a step's, and the step within it; those
        of another if there is no such step."""
        step = cutlass.select_(step < steps, step, Int32(0))
        index = cutlass.select_(steps > 0, before + step // self.chunks, Int32(0))
        return index, step % self.chunks

    @cute.jit
    def place(self, base, before, step, steps, at, scales_at):
        """Where a lane's blocks and scales of a step begin."""
        index, chunk = self.expert_of(before, step, steps)
        expert = cutlass.max(word(base + self.list_at + 4 * index), Int32(0))
        group = expert * self.expert_groups + self.groups * chunk
        to = at + Int64(STEPS_OF_GROUP * self.step_bytes) * group
        return to, scales_at + Int64(self.rows) * group

    @cute.jit
    def pair_of(self, base, before, step, steps, lane):
        """The pair of this lane's row and a step's expert, or -1."""
        index, _ = self.expert_of(before, step, steps)
        at = base + self.table_at + 4 * (NARROW * index + (lane >> 2))
        return word(at)

    @cute.jit
    def later_pair(self, base, index, time, lane):
        """The pair of this lane's row and an expert behind ``time`` others, or -1."""
        found = Int32(-1)
        seen = Int32(0)
        begin = word(base + self.offsets_at + 4 * index)
        end = word(base + self.offsets_at + 4 * index + 4)
        for i in cutlass.range(begin, end, unroll=1):
            pair = word(base + self.pairs_at + 4 * i)
            if (pair >> self.k_bits) == (lane >> 2):
                found = cutlass.select_(seen == time, pair, found)
                seen = seen + 1
        return found

    @cute.jit
    def column(self, base, before, step, column, steps, lane):
        """The pair of this lane's column, of a step's from ``column`` on, or -1."""
        there = step < steps
        index, _ = self.expert_of(before, step, steps)
        begin = word(base + self.offsets_at + 4 * index)
        count = word(base + self.offsets_at + 4 * index + 4) - begin
        own = column + (lane >> 2)
        live = there & (own < count)
        own = cutlass.select_(live, begin + own, Int32(0))
        pair = word(base + self.pairs_at + 4 * own)
        return cutlass.select_(live, pair, Int32(-1))

    @cute.jit
    def row_of(self, source, pair, step):
        """Where this lane's part of a pair's h of a step begins."""
        at = source + Int64(2 * self.inner) * cutlass.max(pair, Int32(0))
        return at + 2 * GROUP * self.groups * (step % self.chunks)

    @cute.jit
    def fetch(self, tokens, row, live):
        """A lane's h of a step, or zeros."""
        for t in cutlass.range_constexpr(self.groups):
            loaded = ptx.load_global_128_if(row, live, 2 * GROUP * t, no_words())
            for i in cutlass.range_constexpr(4):
                tokens[4 * t + i] = loaded[i]

    @cute.jit
    def multiply(self, acc, held, exponents, tokens, at, scales_at, goes):
        """A step's products, added to sums. Each block that was used makes way for the
        one at ``at``, if the weights go."""
        scales = []
        for t in cutlass.range_constexpr(self.blocks):
            group = t // STEPS_OF_GROUP
            if cutlass.const_expr(t % STEPS_OF_GROUP == 0):
                scales = factors(exponents, group)
            block = words_of(held, TILES, t)
            acc = product(acc, block, (tokens[2 * t], tokens[2 * t + 1]), scales)
            request(held, t, at, self.step_bytes * t, goes, block)
            if cutlass.const_expr((t + 1) % STEPS_OF_GROUP == 0):
                old = words_of(exponents, 2, group)
                request_scales(
                    exponents, group, scales_at, self.rows * group, goes, old
                )
        return acc

    @cute.jit
    def load(self, sums, row, lane):
        """This lane's sums of its two columns' rows, which lanes of those columns
        know."""
        cute.arch.sync_warp()
        acc = [[], [], [], []]
        values = []
        for i in cutlass.range_constexpr(2):
            own = cute.arch.shuffle_sync(row, 4 * (2 * (lane & 3) + i))
            at = sums + 4 * PITCH * cutlass.max(own, Int32(0))
            values.append([word(at + 32 * part, Float32) for part in range(2 * TILES)])
        for j in cutlass.range_constexpr(TILES):
            acc[j] = (
                values[0][2 * j],
                values[1][2 * j],
                values[0][2 * j + 1],
                values[1][2 * j + 1],
            )
        return acc

    @cute.jit
    def leave(self, sums, row, acc, several, turn, lane):
        """Sums back to their places, those of a column without a pair, or whose turn
        it is not, excepted."""
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(2):
            column = 2 * (lane & 3) + i
            own = cute.arch.shuffle_sync(row, 4 * column)
            at = sums + 4 * PITCH * own
            if (own >= 0) & (~several | (column == turn)):
                for j in cutlass.range_constexpr(TILES):
                    for half in cutlass.range_constexpr(2):
                        put(at + 32 * (2 * j + half), acc[j][2 * half + i], Float32)

    def total(self, base, token, quad):
        """The warps' sums of four columns of a row, in order."""
        at = base + self.own_at + 4 * PITCH * token + 16 * quad
        value = ptx.load_shared_f32x4(at)
        for w in range(1, self.warps):
            part = ptx.load_shared_f32x4(at, self.own_bytes * w)
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
    def store(self, base, rows, rank, group, thread, out):
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
                out[token, column + j] = (own[j] + other[j]).to(BFloat16)
