# SPDX-License-Identifier: Apache-2.0
"""KDA verify, one launch from the packed projection to the gated output.

A cluster of C CTAs owns one head of one request, and a CTA 128 / C channels of it: that
many rows of the state S [V, K]. What the head's rows need besides is little, so every
CTA computes it whole; only the norm's sums cross the cluster.

    loads        all by bulk copies into shared memory, as early as their addresses are
                 known: the rows' q, k, v, gate and f_a, the window's taps, the CTA's
                 part of the state, the rows that wait to be folded
    vectors      a warp a (row, kind): convolution, SiLU, and for q and k unit length
    decay        W_fb f_a by mma.sync, rounded to bf16, then e^g; 16 channels a warp
    fold         the accepted rows of the last step are applied; the state is stored
    recurrence   the new rows; the state after each is stored in snapshots, which fold
                 nothing
    output       sums of o^2 over 4 channels each to every CTA, RMSNorm over the head,
                 gate, one rounding to bf16; and the records for the next step

Sixteen lanes share E = 8 / C channels. Lane j of them has columns 4 j + 64 i .. + 3 of
the state's rows, i < 2, in registers from the fold to the last row. With C = 1 a vector
read from shared memory thus serves eight channels, and two heads fit an SM.

Every sum has one order whatever C and the widths are: over K 8 products in a lane, then
16 lanes; over V 4 channels, then 32 sums; W_fb in steps of mma.sync.
Products that are added are written as fma, so no compiler chooses. A row thus has the
same bits at any width and C, and folding a row those of having computed it.

Nothing of a slot is written before all that read it have: the state belongs to a CTA,
and what every CTA reads, the window, the records and counts, is written after the
exchange of the norm's sums, when all of them have. No trailing cluster barrier is
needed: a CTA leaves only when all that its peers send it has come, and nothing reads a
peer's memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from verify_kernels.common import ptx
from verify_kernels.kda.device import (
    add_tree,
    dot,
    exp_of,
    halves,
    over_lanes,
    sigmoid,
    sums_of_channels,
)

#: K and V.
DIM = 128
TAPS = 4
MAX_WIDTH = 8
#: Lanes of a channel, and the columns of one.
PARTS = 16
COLUMNS = DIM // PARTS
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
#: Barriers: taps of the convolution; rows; state; squares.
TAPS_FULL, ROWS_FULL, STATE_FULL, SQUARES_FULL = (8 * i for i in range(4))


class KdaKernel:
    """For any number of heads and requests.

    Args:
        ctas: C, CTAs of a cluster: 1, 2, 4 or 8.
        fold: the layout of `KdaFoldState`; else a snapshot a row, in vLLM's slots.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    early_loads = ("w_fb", "conv", "a_log", "dt_bias")

    def __init__(self, ctas: int, fold: bool):
        self.ctas = ctas
        self.fold = fold
        records = ("u", "key", "decay", "counts") if fold else ()
        self.parameters = (
            "packed",
            *self.early_loads,
            "norm",
            "row_start",
            "state_slots",
            "accepted",
            "state",
            "window",
            *records,
            "out",
        )
        self.kinds = KINDS if fold else OLD_U
        #: Taps that stay in front of a step's rows in the window.
        self.past = TAPS - 1 if fold else TAPS - 2
        #: Of a CTA.
        self.channels = DIM // ctas
        #: Of sixteen lanes, and how many of them hold the sum of one.
        self.each = self.channels * PARTS // THREADS
        self.span = PARTS // self.each

        # Shared memory: barriers; beta of eight rows, and the snapshots' slots; the
        # vectors; bf16 lines. The outputs take the place of the taps, and the new rows'
        # u that of the old ones': two CTAs of a whole head fit an SM.
        self.betas_at = 32
        self.targets_at = 64
        self.vectors_at = 96
        self.lines_at = self.vectors_at + self.kinds * KIND_BYTES
        self.gates_at = self.lines_at + (TAPS - 1 + MAX_WIDTH) * ENTRY_BYTES
        self.f_at = self.gates_at + MAX_WIDTH * LINE_BYTES
        self.taps_at = self.f_at + MAX_WIDTH * LINE_BYTES
        self.outputs_at = self.taps_at
        self.state_at = self.taps_at + 3 * 4 * TAPS * DIM
        self.squares_at = self.state_at + self.channels * VECTOR_BYTES
        self.shared_bytes = self.squares_at + MAX_WIDTH * SQUARES_BYTES

    @cute.jit
    def __call__(
        self,
        packed: cute.Tensor,
        w_fb: cute.Tensor,
        conv: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        norm: cute.Tensor,
        row_start: cute.Tensor,
        state_slots: cute.Tensor,
        accepted: cute.Tensor,
        state: cute.Tensor,
        window: cute.Tensor,
        u,
        key,
        decay,
        counts,
        out: cute.Tensor,
        lower_bound: Float32,
        eps: Float32,
        slots_of_request: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            packed,
            w_fb,
            conv,
            a_log,
            dt_bias,
            norm,
            row_start,
            state_slots,
            accepted,
            state,
            window,
            u,
            key,
            decay,
            counts,
            out,
            lower_bound,
            eps,
            slots_of_request,
        ).launch(
            grid=[self.ctas, a_log.shape[0], state_slots.shape[0]],
            block=[THREADS, 1, 1],
            cluster=[self.ctas, 1, 1] if self.ctas > 1 else None,
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            # 128 registers a thread.
            min_blocks_per_mp=2,
            # As the GEMMs around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        packed: cute.Tensor,
        w_fb: cute.Tensor,
        conv: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        norm: cute.Tensor,
        row_start: cute.Tensor,
        state_slots: cute.Tensor,
        accepted: cute.Tensor,
        state: cute.Tensor,
        window: cute.Tensor,
        u,
        key,
        decay,
        counts,
        out: cute.Tensor,
        lower_bound: Float32,
        eps: Float32,
        slots_of_request: Int32,
    ):
        rank, head, request = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = thread // 32
        part = lane % PARTS
        # The first of the E channels of this lane's sixteen.
        local = self.each * (thread // PARTS)
        channel = rank * self.channels + local
        heads = a_log.shape[0]
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        if thread == 0:
            for i in cutlass.range_constexpr(4):
                cute.arch.mbarrier_init(self.barrier(base + 8 * i), 1)
            cute.arch.mbarrier_init_fence()
            size = 4 * TAPS * DIM
            self.expect(base + TAPS_FULL, 3 * size)
            for kind in cutlass.range_constexpr(3):
                line_at = conv.iterator.toint() + Int64(size) * (kind * heads + head)
                place = base + self.taps_at + size * kind
                ptx.bulk_load(place, line_at, size, base + TAPS_FULL)
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()

        # Not `load_weights_128`: ptxas moves a .nc load down past the wait.
        filter_row = 16 * warp + lane // 4
        line_at = w_fb.iterator.toint() + Int64(LINE_BYTES) * (head * DIM + filter_row)
        line_at = line_at + 16 * (lane % 4)
        words = [
            ptx.load_global_128(line_at, 64 * j + 8 * LINE_BYTES * half)
            for j in range(4)
            for half in range(2)
        ]
        bias = [dt_bias[head, filter_row + 8 * half] for half in range(2)]
        rate = a_log[head]
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        begin = row_start[request]
        width = cutlass.min(row_start[request + 1] - begin, Int32(MAX_WIDTH))
        if const_expr(self.fold):
            slot = state_slots[request]
        else:
            slot = state_slots[request, 0]
        if (slot > 0) & (width > 0):
            # Of eight lanes; those of rows that do not exist do as the last row's.
            row = cutlass.min(lane % MAX_WIDTH, width - 1)
            told = accepted[request]
            source = slot
            #: Rows to fold, and the first of the three past taps in the window.
            if const_expr(self.fold):
                waiting = cutlass.min(cutlass.max(told, Int32(0)), counts[slot, head, 0])
                oldest = waiting
            else:
                taken = cutlass.min(cutlass.max(told, Int32(1)), slots_of_request)
                # Even a wrong count reads a slot that is there.
                source = cutlass.max(state_slots[request, taken - 1], Int32(0))
                waiting = Int32(0)
                oldest = taken - 1
            pitch = Int64(2) * packed.stride[0]
            packed_at = packed.iterator.toint() + pitch * begin
            own_at = packed_at + pitch * row
            window_pitch = Int64(2) * window.stride[1]
            window_at = window.iterator.toint() + Int64(2) * window.stride[0] * slot
            window_at = window_at + Int64(LINE_BYTES) * head
            state_pitch = Int64(4) * state.stride[0]
            within = state.iterator.toint() + Int64(VECTOR_BYTES) * (
                head * DIM + rank * self.channels
            )
            kind_bytes = Int64(LINE_BYTES) * heads

            if thread == 0:
                size = MAX_WIDTH * LINE_BYTES + (TAPS - 1) * ENTRY_BYTES
                self.expect(base + ROWS_FULL, size + ENTRY_BYTES * width)
                size = self.channels * VECTOR_BYTES + LINE_BYTES * width
                self.expect(base + STATE_FULL, size + 3 * VECTOR_BYTES * waiting)
                if const_expr(self.ctas > 1):
                    self.expect(base + SQUARES_FULL, 4 * QUADS * width)
            if (warp == 0) & (lane < MAX_WIDTH):
                place = base + self.f_at + LINE_BYTES * lane
                full = base + ROWS_FULL
                ptx.bulk_load(place, own_at + 4 * kind_bytes, LINE_BYTES, full)
                if lane < width:
                    line_at = own_at + Int64(LINE_BYTES) * head
                    place = base + self.lines_at + ENTRY_BYTES * (TAPS - 1 + lane)
                    for kind in cutlass.range_constexpr(3):
                        from_at = line_at + kind_bytes * kind
                        ptx.bulk_load(
                            place + LINE_BYTES * kind, from_at, LINE_BYTES, full
                        )
                    place = base + self.gates_at + LINE_BYTES * lane
                    full = base + STATE_FULL
                    ptx.bulk_load(place, line_at + 3 * kind_bytes, LINE_BYTES, full)
            if warp == 1:
                if lane < 3 * (TAPS - 1):
                    from_at = window_at + window_pitch * (oldest + lane // 3)
                    from_at = from_at + kind_bytes * (lane % 3)
                    place = base + self.lines_at + LINE_BYTES * lane
                    ptx.bulk_load(place, from_at, LINE_BYTES, base + ROWS_FULL)
                full = base + STATE_FULL
                if lane == 16:
                    size = self.channels * VECTOR_BYTES
                    from_at = within + state_pitch * source
                    ptx.bulk_load(base + self.state_at, from_at, size, full)
                if const_expr(self.fold):
                    if (lane > 16) & (lane < 20) & (waiting > 0):  # noqa: SIM102
                        from_at = self.slot_of(u, slot)
                        if lane == 18:
                            from_at = self.slot_of(key, slot)
                        if lane == 19:
                            from_at = self.slot_of(decay, slot)
                        place = base + self.vectors_at + KIND_BYTES * (OLD_U - 17 + lane)
                        size = VECTOR_BYTES * waiting
                        from_at = from_at + KIND_BYTES * Int64(head)
                        ptx.bulk_load(place, from_at, size, full)
            if (warp == 2) & (lane < MAX_WIDTH):
                beta = self.bf16_at(own_at + 4 * kind_bytes + LINE_BYTES, head)
                ptx.store_shared_f32(base + self.betas_at + 4 * lane, sigmoid(beta))
                if const_expr(not self.fold):
                    targets = self.shared(base + self.targets_at + 4 * lane, Int32, 1)
                    targets[0] = state_slots[request, row]

            cute.arch.mbarrier_wait(self.barrier(base + TAPS_FULL), 0)
            cute.arch.mbarrier_wait(self.barrier(base + ROWS_FULL), 0)
            for task in cutlass.range(warp, 3 * width, WARPS, unroll=1):
                self.vector(base, task, width, lane)
            self.decays(base, filter_row, words, bias, rate, lower_bound, lane)
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(self.barrier(base + STATE_FULL), 0)
            # Nobody else reads what this replaces, and the registers are still there.
            if const_expr(self.ctas == 1):
                self.record(base, window, key, decay, slot, head, heads, width)
                if const_expr(self.fold):
                    self.count(counts, slot, head, width, told)

            s = cute.make_rmem_tensor((self.each * COLUMNS,), Float32)
            place = base + self.state_at + VECTOR_BYTES * local + 16 * part
            for i in cutlass.range_constexpr(2 * self.each):
                four = ptx.load_shared_f32x4(
                    place, VECTOR_BYTES * (i // 2) + 256 * (i % 2)
                )
                for j in cutlass.range_constexpr(4):
                    s[4 * i + j] = four[j]
            columns = base + self.vectors_at + 16 * part
            state_at = within + Int64(VECTOR_BYTES) * local + 16 * part
            #: The channel whose sums this lane holds, of its sixteen's E.
            own = base + self.vectors_at + 4 * (channel + part // self.span)
            if const_expr(self.fold):
                changes = base + self.vectors_at + OLD_U * KIND_BYTES + 4 * channel
                for t in cutlass.range(waiting, unroll=1):
                    u_t = self.some(changes + VECTOR_BYTES * t, Float32)
                    for i in cutlass.range_constexpr(COLUMNS // 4):
                        a = self.four(columns, OLD_DECAY, t, i)
                        k = self.four(columns, OLD_KEY, t, i)
                        for r in cutlass.range_constexpr(self.each):
                            for j in cutlass.range_constexpr(4):
                                n = COLUMNS * r + 4 * i + j
                                s[n] = cute.math.fma(u_t[r], k[j], s[n] * a[j])
                if waiting > 0:
                    self.store_state(state_at + state_pitch * slot, s)
                cute.arch.sync_warp()
            for t in cutlass.range(width, unroll=1):
                v_t = self.element(own + VALUE * KIND_BYTES + VECTOR_BYTES * t)[0]
                beta_t = self.element(base + self.betas_at + 4 * t)[0]
                k = []
                sums = [None] * self.each
                for i in cutlass.range_constexpr(COLUMNS // 4):
                    a = self.four(columns, DECAY, t, i)
                    k.append(self.four(columns, KEY, t, i))
                    for r in cutlass.range_constexpr(self.each):
                        n = COLUMNS * r + 4 * i
                        for j in cutlass.range_constexpr(4):
                            s[n + j] = s[n + j] * a[j]
                        sums[r] = dot([s[n + j] for j in range(4)], k[i], sums[r])
                u_own = beta_t * (v_t - sums_of_channels(sums, part))
                u_t = [u_own] * self.each
                if const_expr(self.each > 1):
                    u_t = [
                        cute.arch.shuffle_sync(u_own, lane - part + self.span * r)
                        for r in range(self.each)
                    ]
                sums = [None] * self.each
                for i in cutlass.range_constexpr(COLUMNS // 4):
                    q = self.four(columns, QUERY, t, i)
                    for r in cutlass.range_constexpr(self.each):
                        n = COLUMNS * r + 4 * i
                        for j in cutlass.range_constexpr(4):
                            s[n + j] = cute.math.fma(u_t[r], k[i][j], s[n + j])
                        sums[r] = dot([s[n + j] for j in range(4)], q, sums[r])
                o_own = sums_of_channels(sums, part)
                if part % self.span == 0:
                    place = own - self.vectors_at + self.outputs_at
                    ptx.store_shared_f32(place + VECTOR_BYTES * t, o_own)
                    if const_expr(self.fold):
                        place = own + OLD_U * KIND_BYTES + VECTOR_BYTES * t
                        ptx.store_shared_f32(place, u_own)
                if const_expr(not self.fold):
                    there = self.shared(base + self.targets_at + 4 * t, Int32, 1)[0]
                    if there > 0:
                        self.store_state(state_at + state_pitch * there, s)
            cute.arch.sync_threads()
            if const_expr(self.ctas > 1):
                # The peers' barriers are there.
                cute.arch.cluster_wait()
            if warp < width:
                self.finish(base, norm, out, begin, head, rank, warp, lane, eps)
            if const_expr(self.ctas > 1):
                ptx.wait_cluster(base + SQUARES_FULL, 0)
                self.record(base, window, key, decay, slot, head, heads, width)
                if const_expr(self.fold):
                    self.count(counts, slot, head, width, told)
            if const_expr(self.fold):
                at = self.slot_of(u, slot) + KIND_BYTES * Int64(head)
                quads = self.channels // QUAD
                for i in cutlass.range(thread, quads * width, THREADS, unroll=1):
                    within_row = 16 * (quads * rank + i % quads)
                    offset = VECTOR_BYTES * (i // quads) + within_row
                    self.copy(base, OLD_U * KIND_BYTES + offset, at + offset)
        else:
            if const_expr(self.ctas > 1):
                cute.arch.cluster_wait()
            # The copies must not come to a CTA that has left.
            cute.arch.mbarrier_wait(self.barrier(base + TAPS_FULL), 0)
            if (slot <= 0) & (warp < width) & (lane < self.channels // QUAD):
                line = cute.make_rmem_tensor((QUAD,), BFloat16)
                line.fill(BFloat16(0.0))
                self.store_out(out, begin + warp, head, rank, lane, line)

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
    def element(self, address):
        """A Float32 of shared memory."""
        return self.shared(address, Float32, 1)

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
    def vector(self, base, task, width, lane):
        """A warp's row of q, k or v: convolution and SiLU, and unit length for q and k,
        q times 128^-1/2. A lane has four channels, two of each half."""
        kind = Int32(task >= width) + Int32(task >= 2 * width)
        row = task - width * kind
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
        unit = cute.math.rsqrt(over_lanes(dot(x, x)) + L2_EPS, fastmath=True)
        unit = cutlass.select_(kind == QUERY, unit * DIM**-0.5, unit)
        unit = cutlass.select_(kind == VALUE, Float32(1.0), unit)
        place = base + self.vectors_at + KIND_BYTES * kind + VECTOR_BYTES * row
        for half in cutlass.range_constexpr(2):
            pair = self.shared(place + 8 * lane + 2 * DIM * half, Float32, 2)
            for c in cutlass.range_constexpr(2):
                pair[c] = x[2 * half + c] * unit

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
    def four(self, columns, kind, row, i):
        """The i-th four of this lane's columns of a vector."""
        return ptx.load_shared_f32x4(
            columns + kind * KIND_BYTES + VECTOR_BYTES * row, 256 * i
        )

    @cute.jit
    def finish(self, base, norm, out, begin, head, rank, row, lane, eps):
        """A warp's row: the sums of squares to and from the cluster, norm and gate. A
        lane has four neighbouring channels of this CTA, if there are so many."""
        mine = lane < self.channels // QUAD
        channel = QUAD * (self.channels // QUAD * rank + lane)
        if not mine:
            channel = Int32(0)
        weights = ptx.load_global_128(norm.iterator.toint() + Int64(4) * channel)
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
        mean = cute.math.fma(over_lanes(square), Float32(1.0 / DIM), eps)
        spread = cute.math.rsqrt(mean, fastmath=True)
        if mine:
            line = cute.make_rmem_tensor((QUAD,), BFloat16)
            for i in cutlass.range_constexpr(QUAD):
                scale = ptx.float_from_bits(weights[i])
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
    def record(self, base, window, key, decay, slot, head, heads, width):
        """The taps before row 0 and the rows to the window, keys and decays to their
        records: a part of them by each CTA of the cluster."""
        rank, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        begin = THREADS * rank + thread
        step = THREADS * self.ctas
        lines = ENTRY_BYTES // 16
        window_at = window.iterator.toint() + Int64(2) * window.stride[0] * slot
        place = base + self.lines_at + ENTRY_BYTES * (TAPS - 1 - self.past)
        for i in cutlass.range(begin, lines * (self.past + width), step, unroll=1):
            within = 16 * (i % lines)
            column = LINE_BYTES * (within // LINE_BYTES * heads + head)
            at = window_at + Int64(2) * window.stride[1] * (i // lines)
            at = at + column + within % LINE_BYTES
            ptx.store_global_128(at, ptx.load_shared_128(place + 16 * i))
        if const_expr(self.fold):
            for kind, records in ((KEY, key), (DECAY, decay)):
                at = self.slot_of(records, slot) + KIND_BYTES * Int64(head)
                for i in cutlass.range(begin, QUADS * width, step, unroll=1):
                    self.copy(base, kind * KIND_BYTES + 16 * i, at + 16 * i)

    @cute.jit
    def count(self, counts, slot, head, width, told):
        """The rows recorded, and one more if more were told accepted than there were."""
        rank, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        if (thread == 0) & (rank == 0):
            if told > counts[slot, head, 0]:
                counts[slot, head, 1] = counts[slot, head, 1] + 1
            counts[slot, head, 0] = width

    @cute.jit
    def copy(self, base, offset, address):
        """16 bytes of the vectors to global memory."""
        words = ptx.load_shared_128(base + self.vectors_at + offset)
        ptx.store_global_128(address, words)
