# SPDX-License-Identifier: Apache-2.0
"""The second half of the experts: W2_e h_p of each pair p of a row and an expert e; h_p
has its weight already. `combine` adds the pairs of a row.

An item of work is 64 latent columns of one expert, a part of I, for all pairs of that
expert. A warp takes items in turn, all warps of all CTAs in one list, and has each for
itself: no warp waits for another once the plan has been copied.

    plan         the distinct experts and their pairs, in the shared memory of every CTA
    ahead        a step is 64 columns of I: four blocks of weights, their scales, the
                 pairs' h; the next two steps are on their way to the warp's own part of
                 shared memory, also those of the next item
    multiply     weights become bf16 in registers and are the 16-row operands of
                 m16n8k16, eight pairs the columns
    store        the sums in fp32, by part and pair

Columns without a pair hold zeros, or what was there before: no column of a product
depends on another, and they are not stored. An expert with more than eight pairs is
read again, from L2. A pair's bits depend on its h and expert alone.

A row of K3 makes 896 items at TP 16, eight rows about 6,700, for the 2,112 warps of an
H200. Where the experts were dealt out by id, which keeps a row's sum in registers, the
largest of eight parts had a third more than the mean, of eight rows of 896 experts, and
every eight rows read their experts for themselves.

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
    product,
    read_block,
    read_factors,
)
from verify_kernels.moe.experts import CTAS_PER_SM
from verify_kernels.moe.layout import (
    BLOCK_BYTES,
    COLUMNS,
    ROWS,
    STEPS_OF_GROUP,
    filled_columns,
    filled_rows,
    parts_of,
)

#: Of a CTA, of which an SM holds two.
WARPS = 8
THREADS = 32 * WARPS
#: Groups of 32 columns in a step, and blocks.
GROUPS = 2
BLOCKS = GROUPS * STEPS_OF_GROUP
#: A step in shared memory: blocks, the pairs' h, the scales.
TOKENS_AT = BLOCK_BYTES * BLOCKS
SCALES_AT = TOKENS_AT + GROUPS * PAIRS * ROW_BYTES
SLOT_BYTES = SCALES_AT + GROUPS * ROWS
#: Steps that a warp has room for, at most; all but one are under way.
RING = 3


class ExpertsDownKernel:
    """For any number of rows and experts.

    Args:
        latent: L, rows of the second matrix, a multiple of 64.
        inner: I, columns, in parts of a multiple of 64.
        experts: E, experts that there are.
        top_k: K.
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
        self.parts = parts_of(inner)
        if inner % (self.parts * COLUMNS * BLOCKS):
            raise ValueError(
                f"inner={inner}: {self.parts} parts of it are not whole steps of "
                f"{COLUMNS * BLOCKS} columns"
            )
        #: Columns of a part.
        self.columns = inner // self.parts
        steps = self.columns // (COLUMNS * BLOCKS)
        self.ring = max(n for n in range(1, RING + 1) if steps % n == 0)
        #: A place is asked for anew one step later, or if it is the only one, at once.
        self.lag = min(self.ring - 1, 1)
        self.laps = steps // self.ring
        #: Groups of latent columns; items of an expert.
        self.groups = latent // ROWS
        self.items = self.groups * self.parts
        self.rows = filled_rows(latent)
        self.expert_blocks = filled_columns(held) // COLUMNS
        self.step_bytes = BLOCK_BYTES * (self.rows // ROWS)
        self.pairs = MAX_ROWS * top_k
        # Shared memory: the warps' steps; the plan.
        self.plan = Plan(WARPS * SLOT_BYTES * self.ring, experts, self.pairs, THREADS)
        self.shared_bytes = self.plan.end

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
        out: cute.Tensor,  # fp32 [parts, 64 K, L]
        ctas: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(x, words, scales, experts, offsets, pairs, counts, out).launch(
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
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        to = base + SLOT_BYTES * self.ring * warp
        for slot in cutlass.range_constexpr(self.ring):
            for i in cutlass.range_constexpr(GROUPS):
                clear(to + SLOT_BYTES * slot + TOKENS_AT + PAIRS * ROW_BYTES * i, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = counts[0]
        self.plan.copy(base, (experts, offsets, pairs), thread)
        cute.arch.sync_threads()
        items = used * self.items
        zero = hidden_zero(used)
        # One item of every CTA before the second of any.
        first = block + ctas * warp
        step = ctas * WARPS
        there = first < items
        at, scales_at, part, group, begin, count = self.place(
            base, words, scales, first, there, lane
        )
        row, own = self.row_of(base, x, part, begin, count, Int32(0), lane)
        if there:
            for q in cutlass.range_constexpr(self.ring - self.lag):
                self.request(to, q, q, at, scales_at, row, own, lane)
        total = cute.make_rmem_tensor((4 * TILES,), Float32)
        free = to
        for item in cutlass.range(first, items, step, unroll=1):
            there = item + step < items
            next_at, next_scales_at, next_part, next_group, next_begin, next_count = (
                self.place(base, words, scales, item + step, there, lane)
            )
            for column in cutlass.range(0, count, PAIRS, unroll=1):
                # Next come the other pairs of this item, or the next one.
                again = column + PAIRS < count
                next_row, next_own = self.row_of(
                    base,
                    x,
                    cutlass.select_(again, part, next_part),
                    cutlass.select_(again, begin, next_begin),
                    cutlass.select_(again, count, next_count),
                    cutlass.select_(again, column + PAIRS, Int32(0)),
                    lane,
                )
                free = self.multiply(
                    total, to, free, at, scales_at, row, own,
                    cutlass.select_(again, at, next_at),
                    cutlass.select_(again, scales_at, next_scales_at), next_row,
                    next_own, there | again, zero, lane,
                )  # fmt: skip
                self.store(base, total, out, part, group, begin, column, count, lane)
                row = next_row
                own = next_own
            at = next_at
            scales_at = next_scales_at
            part = next_part
            group = next_group
            begin = next_begin
            count = next_count

    @cute.jit
    def place(self, base, words, scales, item, there, lane):
        """Where a lane's blocks and scales of an item begin, its part and group, where
        its pairs begin and how many they are; those of another if that is not there."""
        item = cutlass.select_(there, item, Int32(0))
        index = Int32(Uint32(item) // Uint32(self.items))
        rest = item - self.items * index
        part = Int32(Uint32(rest) // Uint32(self.groups))
        group = rest - self.groups * part
        first = self.plan.expert(base, index) * self.expert_blocks
        first = first + (self.columns // COLUMNS) * part
        begin, count = self.plan.pairs_of(base, index)
        at = words.iterator.toint() + Int64(self.step_bytes) * first
        at = at + BLOCK_BYTES * group + CHUNK * lane
        scales_at = scales.iterator.toint() + Int64(self.rows) * (first >> 1)
        # Lanes 0 .. 3 have the first group's, the next four the second's.
        scales_at = scales_at + self.rows * ((lane >> 2) & 1)
        scales_at = scales_at + ROWS * group + CHUNK * (lane & 3)
        return at, scales_at, part, group, begin, count

    @cute.jit
    def row_of(self, base, x, part, begin, count, column, lane):
        """Where this lane's part of a pair's h begins, of an item's eight pairs from
        ``column`` on, and whether there is such a pair."""
        mine = column + (lane >> 2)
        there = mine < count
        place = begin + cutlass.select_(there, mine, Int32(0))
        pair = cutlass.max(self.plan.pair(base, place), Int32(0))
        row = x.iterator.toint() + Int64(2 * self.inner) * pair
        row = row + 2 * self.columns * part + CHUNK * (lane & 3)
        return row, Int32(there)

    @cute.jit
    def request(
        self, to, slot: cutlass.Constexpr, q: cutlass.Constexpr, at, scales_at, row,
        own, lane,
    ):  # fmt: skip
        """Copies of the q-th step from there on."""
        mine = to + CHUNK * lane
        place = SLOT_BYTES * slot
        always = Int32(1)
        for b in cutlass.range_constexpr(BLOCKS):
            ptx.copy_async_128_if(
                mine, at, always, place + BLOCK_BYTES * b,
                self.step_bytes * (BLOCKS * q + b),
            )  # fmt: skip
        for i in cutlass.range_constexpr(GROUPS):
            ptx.copy_async_128_if(
                mine, row, own, place + TOKENS_AT + PAIRS * ROW_BYTES * i,
                ROW_BYTES * (GROUPS * q + i),
            )  # fmt: skip
        ptx.copy_async_128_if(
            mine, scales_at, Int32(lane < GROUPS * ROWS // CHUNK), place + SCALES_AT,
            self.rows * GROUPS * q,
        )  # fmt: skip
        ptx.commit_copies()

    @cute.jit
    def multiply(
        self, total, to, free, at, scales_at, row, own, next_at, next_scales_at,
        next_row, next_own, more, zero, lane,
    ):  # fmt: skip
        """This warp's sums of eight pairs. A step that was used makes way for a later
        one, or if there is more to multiply, one of the first of that. Returns the
        warp's place, known when the last products are."""
        total.fill(0.0)
        for lap in cutlass.range(self.laps, unroll=1):
            last = lap == self.laps - 1
            then_at = at + self.step_bytes * BLOCKS * self.ring
            then_at = cutlass.select_(last, next_at, then_at)
            then_scales_at = scales_at + self.rows * GROUPS * self.ring
            then_scales_at = cutlass.select_(last, next_scales_at, then_scales_at)
            then_row = row + ROW_BYTES * GROUPS * self.ring
            then_row = cutlass.select_(last, next_row, then_row)
            then_own = cutlass.select_(last, next_own, own)
            goes_on = more | (lap < self.laps - 1)
            for q in cutlass.range_constexpr(self.ring):
                place = SLOT_BYTES * q
                ptx.wait_copies(max(self.ring - 1 - self.lag, 0))
                cute.arch.sync_warp()
                tokens = [
                    ptx.load_shared_128(
                        to + CHUNK * lane, place + TOKENS_AT + PAIRS * ROW_BYTES * i
                    )
                    for i in range(GROUPS)
                ]
                factors = [
                    read_factors(to, place + SCALES_AT + ROWS * i, lane)
                    for i in range(GROUPS)
                ]
                blocks = [
                    read_block(to, place + BLOCK_BYTES * b, lane) for b in range(BLOCKS)
                ]
                if cutlass.const_expr(self.lag == 1):
                    self.ask(
                        free, q, at, scales_at, row, own, then_at, then_scales_at,
                        then_row, then_own, goes_on, lane,
                    )  # fmt: skip
                acc = [tuple(total[4 * j + i] for i in range(4)) for j in range(TILES)]
                for b in cutlass.range_constexpr(BLOCKS):
                    i = b // STEPS_OF_GROUP
                    half = 2 * (b % STEPS_OF_GROUP)
                    acc = product(
                        acc, blocks[b], tokens[i][half : half + 2], factors[i]
                    )
                for j in cutlass.range_constexpr(TILES):
                    for i in cutlass.range_constexpr(4):
                        total[4 * j + i] = acc[j][i]
                # The place is free when the products are there, which need what was
                # read.
                free = to + after(acc, zero)
                if cutlass.const_expr(self.lag == 0):
                    # What other lanes have read they have multiplied, for all multiply
                    # together; racecheck does not know that.
                    cute.arch.sync_warp()
                    self.ask(
                        free, q, at, scales_at, row, own, then_at, then_scales_at,
                        then_row, then_own, goes_on, lane,
                    )  # fmt: skip
            at = then_at
            scales_at = then_scales_at
            row = then_row
            own = then_own
        return free

    @cute.jit
    def ask(
        self, free, q: cutlass.Constexpr, at, scales_at, row, own, then_at,
        then_scales_at, then_row, then_own, goes_on, lane,
    ):  # fmt: skip
        """Copies to the place that is free in the q-th step of a lap."""
        new = q - self.lag + self.ring
        slot = new % self.ring
        if cutlass.const_expr(new < self.ring):
            self.request(free, slot, new, at, scales_at, row, own, lane)
        else:
            first = new - self.ring
            if goes_on:
                self.request(
                    free, slot, first, then_at, then_scales_at, then_row, then_own, lane
                )
            else:
                ptx.commit_copies()

    @cute.jit
    def store(self, base, total, out, part, group, begin, column, count, lane):
        """A lane has two pairs' sums, of rows g and g + 8 of each tile."""
        for i in cutlass.range_constexpr(2):
            mine = column + 2 * (lane & 3) + i
            if mine < count:
                pair = self.plan.pair(base, begin + mine)
                at = Int64(self.latent) * (self.pairs * part + pair)
                at = out.iterator.toint() + 4 * at + 4 * (ROWS * group + (lane >> 2))
                pointer = cute.make_ptr(
                    Float32, at, cute.AddressSpace.gmem, assumed_align=4
                )
                sums = cute.make_tensor(
                    pointer, cute.make_layout((2, TILES), stride=(8, 16))
                )
                for j in cutlass.range_constexpr(TILES):
                    for half in cutlass.range_constexpr(2):
                        sums[half, j] = total[4 * j + 2 * half + i]
