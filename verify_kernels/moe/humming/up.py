# SPDX-License-Identifier: Apache-2.0
"""The first half of the experts: h_p = w_p SiTU(W1_e z_m, W3_e z_m) of each pair p.

A pair is a row m and one of the experts e that it chose (`ExpertPlan`). An item of work
is 64 rows of gate and the same of up, of one distinct expert, for all rows that chose
it. Clusters of two take items in turn: CTA 0 has the rows of gate, CTA 1 those of up.
The 8 warps of a CTA share K.

    ahead        half of a warp's blocks are on their way, those of the next item too,
                 into the registers of those just used; so are the rows of its eight
                 pairs, a warp's own columns of them, to shared memory
    multiply     weights become bf16 in registers and are the 16-row operands of
                 m16n8k16, eight pairs of the expert the 8 columns
    add          the warps' sums meet in shared memory, two areas in turn, and are added
                 in the order of K, a warp a pair
    exchange     CTA 0 takes the sums of up of four pairs, CTA 1 those of gate of the
                 other four
    a turn later SiTU, times the pair's weight; one rounding to bf16

An expert with more than eight pairs is read again, from L2. A pair's bits depend on its
row and expert alone: K is cut the same way for all. h lies in the order of
`layout.place_of`.

What a CTA sends in a turn goes to one of two places in turn, and is waited for in the
next turn, in front of its barrier. So a CTA that sends knows that the place is free:
behind the barrier of its turn t it has what the other one sent in t - 1, behind a barrier
that came after the other one had read what was there from t - 2.

Early loads: none; which weights are needed is known when routing has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.common import ptx
from verify_kernels.moe.device import PAIRS, situ, stage, word
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

THREADS = 32 * WARPS
#: Rows of the sums of a pair: lanes of a store, and quads of a load, meet all banks.
PITCH = ROWS + 4
AREA = 4 * PAIRS * PITCH
#: Of a place for what the other CTA sends.
INBOX = 4 * ROWS * PAIRS // 2
#: Warps that send.
SENDERS = PAIRS // 2
#: Bytes of a chunk of a row that a lane copies, and of two blocks' columns.
CHUNK, PAIR_BYTES = 16, 64
#: Between the rows of tokens: those of a matrix that is loaded meet all banks.
ROW_GAP = 16


class ExpertsUpKernel:
    """For any number of rows and experts.

    Args:
        latent: L, columns of the input, a multiple of 256 up to 3584, or 128.
        inner: I, rows of gate and of up, a multiple of 64.
        experts: E, experts that there are.
        top_k: K, a power of two.
        held: rows of each that the layer has, I and then zeros, a multiple of 64.
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

    def __init__(self, latent: int, inner: int, experts: int, top_k: int, held: int):
        self.experts = experts
        self.inner = inner
        self.k_bits = top_k.bit_length() - 1
        #: Blocks of a warp along K, and their groups of scales.
        self.steps = latent // COLUMNS // WARPS
        self.groups = max(self.steps // STEPS_OF_GROUP, 1)
        #: Blocks, and groups of scales, that are held: half of a warp's, which is twice
        #: what memory needs to have under way.
        halves = 2 if self.steps % (2 * STEPS_OF_GROUP) == 0 else 1
        self.ring = self.steps // halves
        self.scale_ring = self.groups // halves
        self.blocks = inner // ROWS
        #: Where up begins.
        self.up_block = held // ROWS
        #: Of both matrices, and of K.
        self.rows = filled_rows(2 * held)
        self.expert_steps = filled_columns(latent) // COLUMNS
        self.step_bytes = BLOCK_BYTES * (self.rows // ROWS)
        self.chunks = 2 * self.steps
        self.pitch = CHUNK * self.chunks + ROW_GAP
        self.tokens_bytes = PAIRS * self.pitch
        # Shared memory: two barriers; the warps' sums, twice; two places for the other
        # CTA's; the warps' tokens, twice; the distinct experts, their offsets.
        self.areas_at = 16
        self.inbox_at = self.areas_at + 2 * WARPS * AREA
        self.tokens_at = self.inbox_at + 2 * INBOX
        self.list_at = self.tokens_at + 2 * WARPS * self.tokens_bytes
        self.offsets_at = self.list_at + 4 * experts
        self.shared_bytes = self.offsets_at + 4 * (experts + 1)
        self.kept_shared = ((self.list_at, self.shared_bytes),)

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
        weights: cute.Tensor,
        out: cute.Tensor,
        beta: Float32,
        linear: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        size, _, _ = cute.arch.grid_dim()
        rank = number & 1
        first = number >> 1
        step = size >> 1
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        g = lane >> 2
        c = lane & 3
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(self.barrier(base + 8 * i), SENDERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        used = counts[0]
        stage(base + self.list_at, experts, self.experts, thread, THREADS)
        stage(base + self.offsets_at, offsets, self.experts + 1, thread, THREADS)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()

        items = used * self.blocks
        held = cute.make_rmem_tensor((4 * self.ring,), Int32)
        exponents = cute.make_rmem_tensor((2 * self.scale_ring,), Int32)
        there = first < items
        at, scales_at = self.place(base, words, scales, first, there, rank, warp, lane)
        for t in cutlass.range_constexpr(self.ring):
            self.request(held, t, t, at, Int32(there), ())
        for t in cutlass.range_constexpr(self.scale_ring):
            self.request_scales(exponents, t, t, scales_at, Int32(there), ())
        tokens = base + self.tokens_at + 2 * self.tokens_bytes * warp
        self.copy(x, base, pairs, first, Int32(0), there, tokens, lane, warp)
        turn = Int32(0)
        # Of the turn before: this thread's sums, its pair or -1, where its h goes.
        own = cute.make_rmem_tensor((4,), Float32)
        own.fill(0.0)
        pair = Int32(-1)
        place = Int64(0)
        for item in cutlass.range(first, items, step, unroll=1):
            there = item + step < items
            next_at, next_scales_at = self.place(
                base, words, scales, item + step, there, rank, warp, lane
            )
            index = item // self.blocks
            block = item - index * self.blocks
            begin = word(base + self.offsets_at + 4 * index)
            count = word(base + self.offsets_at + 4 * index + 4) - begin
            for column in cutlass.range(0, count, PAIRS, unroll=1):
                # Next come the other pairs of this item, or the next one.
                again = column + PAIRS < count
                then = cutlass.select_(again, at, next_at)
                scales_then = cutlass.select_(again, scales_at, next_scales_at)
                buffer = turn & 1
                ptx.wait_copies(0)
                cute.arch.sync_warp()
                self.copy(
                    x, base, pairs,
                    cutlass.select_(again, item, item + step),
                    cutlass.select_(again, column + PAIRS, Int32(0)),
                    there | again, tokens + self.tokens_bytes * (1 - buffer), lane,
                    warp,
                )  # fmt: skip
                acc = self.multiply(
                    tokens + self.tokens_bytes * buffer, held, exponents, at,
                    scales_at, then, scales_then, Int32(there | again),
                    Int32(count > 0), lane,
                )  # fmt: skip
                if turn > 0:
                    self.finish(
                        base, turn - 1, own, pair, place, rank, lane, warp, weights,
                        out, beta, linear,
                    )  # fmt: skip
                area = base + self.areas_at + WARPS * AREA * buffer
                self.leave(acc, area + AREA * warp, g, c)
                cute.arch.sync_threads()
                self.add(base, area, buffer, own, rank, lane, warp)
                mine = column + warp
                pair = pairs[begin + cutlass.min(mine, count - 1)]
                place = Int64(pair) * self.inner + ROWS * block
                pair = cutlass.select_(mine < count, pair, Int32(-1))
                turn = turn + 1
            at = next_at
            scales_at = next_scales_at
        if turn > 0:
            self.finish(
                base, turn - 1, own, pair, place, rank, lane, warp, weights, out, beta,
                linear,
            )  # fmt: skip

    def barrier(self, address):
        return cute.make_ptr(
            cutlass.Int64, address, cute.AddressSpace.smem, assumed_align=8
        )

    @cute.jit
    def place(self, base, words, scales, item, there, rank, warp, lane):
        """Where a lane's blocks and scales of an item begin, or another's if that is
        not there."""
        item = cutlass.select_(there, item, Int32(0))
        index = item // self.blocks
        expert = cutlass.max(word(base + self.list_at + 4 * index), Int32(0))
        block = item - index * self.blocks + self.up_block * rank
        step = Int64(expert) * self.expert_steps + self.steps * warp
        at = words.iterator.toint() + self.step_bytes * step
        at = at + BLOCK_BYTES * block + 16 * lane
        # With one step a warp two warps share a group.
        group = step >> 1
        scales_at = scales.iterator.toint() + self.rows * group
        return at, scales_at + ROWS * block + 8 * (lane >> 2)

    @cute.jit
    def copy(self, x, base, pairs, item, column, there, to, lane, warp):
        """Requests this warp's columns of eight pairs' rows, from the ``column``-th pair
        of an item on, if that is there."""
        item = cutlass.select_(there, item, Int32(0))
        index = item // self.blocks
        begin = word(base + self.offsets_at + 4 * index)
        count = word(base + self.offsets_at + 4 * index + 4) - begin
        g = lane >> 2
        c = lane & 3
        # A column without a pair repeats the last: nobody takes its sums.
        own = cutlass.max(begin + cutlass.min(column + g, count - 1), Int32(0))
        pair = cutlass.max(pairs[own], Int32(0))
        row = Int64(2) * x.stride[0] * (pair >> self.k_bits)
        row = x.iterator.toint() + row + CHUNK * (self.chunks * warp + c)
        to = to + self.pitch * g + CHUNK * c
        for t in cutlass.range_constexpr(-(-self.chunks // 4)):
            live = Int32(there)
            if cutlass.const_expr(4 * t + 4 > self.chunks):
                live = live & Int32(c < self.chunks - 4 * t)
            ptx.copy_async_128_if(to, row, live, 4 * CHUNK * t, 4 * CHUNK * t)
        ptx.commit_copies()

    @cute.jit
    def multiply(
        self, tokens, held, exponents, at, scales_at, then, scales_then, more, live,
        lane,
    ):  # fmt: skip
        """This warp's sums of eight pairs, whose columns are at ``tokens``. A block that
        was used makes way for a later one at ``at``, or if there is more to multiply,
        one of the first at ``then``. ``live`` is 1, which the compiler must not know:
        it would load everything at once, and then spill."""
        acc = no_sums()
        tokens = tokens + self.pitch * (lane & 7) + CHUNK * (lane >> 3)
        ahead = self.fetch(tokens, 0)
        own = ()
        scales = []
        for s in cutlass.range_constexpr(self.steps):
            group = s // STEPS_OF_GROUP
            slot = group % self.scale_ring
            if cutlass.const_expr(s % STEPS_OF_GROUP == 0):
                scales = factors(exponents, slot)
                own = ahead
                if cutlass.const_expr(s + STEPS_OF_GROUP < self.steps):
                    ahead = self.fetch(tokens, group + 1)
            block = words_of(held, TILES, s % self.ring)
            half = 2 * (s % STEPS_OF_GROUP)
            acc = product(acc, block, own[half : half + 2], scales)
            new = s + self.ring
            if cutlass.const_expr(new < self.steps):
                self.request(held, s % self.ring, new, at, live, block)
            else:
                new = new - self.steps
                self.request(held, s % self.ring, new, then, more, block)
            if cutlass.const_expr((s + 1) % STEPS_OF_GROUP == 0 or self.steps == 1):
                old = words_of(exponents, 2, slot)
                new = group + self.scale_ring
                if cutlass.const_expr(new < self.groups):
                    self.request_scales(exponents, slot, new, scales_at, live, old)
                else:
                    new = new - self.groups
                    self.request_scales(exponents, slot, new, scales_then, more, old)
        return acc

    def fetch(self, tokens, group):
        """The B operands of two blocks, or of the only one."""
        count = min(4, self.chunks)
        return ptx.load_matrices(tokens, PAIR_BYTES * group, count)

    def request(self, held, slot, s, at, live, old):
        """A lane's words of block ``s`` of an item."""
        request(held, slot, at, self.step_bytes * s, live, old)

    def request_scales(self, exponents, slot, group, at, live, old):
        """A lane's scales of a group of an item, as `request`."""
        request_scales(exponents, slot, at, self.rows * group, live, old)

    def leave(self, acc, area, g, c):
        """A warp's sums to shared memory, [pair, row]."""
        for j in range(TILES):
            for i in range(4):
                row = 16 * j + g + 8 * (i // 2)
                place = area + 4 * (PITCH * (2 * c + i % 2) + row)
                ptx.store_shared_f32(place, acc[j][i])

    @cute.jit
    def add(self, base, area, buffer, own, rank, lane, warp):
        """This warp's pair: a lane adds four rows' sums, which stay here or go to the
        other CTA."""
        if lane < ROWS // 4:
            at = area + 4 * PITCH * warp + 16 * lane
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
        self, base, turn, own, pair, place, rank, lane, warp, weights, out, beta, linear
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
                share = weights[pair >> self.k_bits, pair & ((1 << self.k_bits) - 1)]
                is_gate = rank == 0
                h = []
                for i in cutlass.range_constexpr(4):
                    gate = cutlass.select_(is_gate, own[i], other[i])
                    up = cutlass.select_(is_gate, other[i], own[i])
                    h.append(share * situ(gate, up, beta, linear))
                # Rows 4 q .. 4 q + 3 of a block are two pairs of columns to the next
                # kernel, those of lanes 2 (q & 1) and the one behind.
                at = place + 32 * (lane >> 3) + 16 * (lane & 1)
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
