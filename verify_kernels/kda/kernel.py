# SPDX-License-Identifier: Apache-2.0
"""KDA verify, one launch from the packed projection to the gated output.

A cluster of C CTAs owns one head of one request, and a CTA 128 / C channels of it: that
many rows of the state S [V, K], and the same channels of q, k, the decay and the gate.
Eight lanes share a channel. Until the exchange lane t of the eight has what row t of
the request needs of the channel; after it lane j has columns 4 j + 32 i .. 4 j + 32 i +
3 of the state's row, i < 4, in registers, for all rows of the request.

    own channels   convolution and SiLU of q, k, v; W_fb product, rounded to bf16; decay
    exchange       q, k and decay of the new rows, key and decay of the rows waiting, to
                   every CTA of the cluster
    fold           the accepted rows of the last step are applied; the state is stored
    recurrence     the new rows, in registers; their u, key and decay are recorded, or
                   the state after each is stored (snapshots, which fold nothing)
    exchange       sums of o^2 over 4 channels each, to every CTA
    output         RMSNorm over the head, gate, one rounding to bf16

Every sum has one order whatever C and the widths are: over K 16 products in a lane,
then eight lanes; over V 4 channels in a warp, then 32 sums in a tree; W_fb in steps of
mma.sync. Products that are added are written as fma, so no compiler chooses. A row thus
has the same bits at any width and C, and folding a row those of having computed it.

Nothing of a slot is written before all that read it have: the state, u and the decay
belong to a lane, a channel's window to lanes of a warp, which have met in between, and
keys and counts are written by one that has received from every CTA. No trailing cluster
barrier is needed: a CTA leaves only when all that its peers send it has come, and
nothing reads a peer's memory.
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
    over_parts,
    sigmoid,
)

#: K and V.
DIM = 128
TAPS = 4
MAX_WIDTH = 8
#: Lanes of a channel; the rows of a request are as many at most.
PARTS = 8
#: Columns of a lane.
COLUMNS = DIM // PARTS
#: Channels whose squares a warp adds, and such sums of a head.
QUAD = 4
QUADS = DIM // QUAD
#: CTAs of a cluster -> channels of a thread. With two the loads of the vectors serve
#: both; with one, few heads are spread over twice the threads.
CHANNELS = {2: 2, 4: 2, 8: 1}
L2_EPS = 1e-6

#: What is exchanged, in shared memory [kind, row, channel]; the last two of rows that
#: wait.
QUERY, KEY, DECAY, OLD_KEY, OLD_DECAY = range(5)
KINDS = 5
ROW_BYTES = 4 * DIM
KIND_BYTES = MAX_WIDTH * ROW_BYTES
#: Of a row's sums of squares; eight rows' meet all banks once.
SQUARES_PITCH = 4 * (QUADS + 4)


class KdaKernel:
    """For any number of heads and requests.

    Args:
        ctas: C, CTAs of a cluster: 2, 4 or 8.
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
        self.kinds = KINDS if fold else OLD_KEY
        #: Taps that stay in front of a step's rows in the window.
        self.past = TAPS - 1 if fold else TAPS - 2
        #: Of a CTA.
        self.channels = DIM // ctas
        self.each = CHANNELS[ctas]
        self.threads = self.channels * PARTS // self.each
        self.warps = self.threads // 32

        # Shared memory: three barriers; this CTA's rows of W_fb; f_a of eight rows; its
        # share of the exchange, eight rows' words in different banks; all of it; and
        # the squares.
        self.pitch = 4 * (self.channels + 4)
        self.weights_at = 32
        self.f_at = self.weights_at + self.channels * 2 * DIM
        self.share_at = self.f_at + MAX_WIDTH * 2 * DIM
        self.all_at = self.share_at + self.kinds * MAX_WIDTH * self.pitch
        self.squares_at = self.all_at + self.kinds * KIND_BYTES
        self.shared_bytes = self.squares_at + MAX_WIDTH * SQUARES_PITCH

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
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            # 128 registers a thread.
            min_blocks_per_mp=512 // self.threads,
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
        part = lane % PARTS
        # Of the CTA; a thread with two has the fourth one after it too, so that a warp
        # has whole groups of four.
        local = thread // 32 * (QUAD * self.each) + lane // PARTS
        channel = rank * self.channels + local
        heads = a_log.shape[0]
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        line = head * DIM + channel
        if thread == 0:
            for i in cutlass.range_constexpr(3):
                cute.arch.mbarrier_init(self.barrier(base + 8 * i), 1)
            cute.arch.mbarrier_init_fence()
            size = self.channels * 2 * DIM
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(base + 16), size)
            line_at = w_fb.iterator.toint() + Int64(2 * DIM) * line
            ptx.bulk_load(base + self.weights_at, line_at, size, base + 16)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()

        # Not `load_weights_128`: ptxas moves a .nc load down past the wait.
        line_at = conv.iterator.toint() + Int64(4 * TAPS) * line
        step = Int64(4 * TAPS * DIM) * heads
        taps = []
        bias = []
        for r in cutlass.range_constexpr(self.each):
            at = line_at + 4 * TAPS * QUAD * r
            taps.append([ptx.load_global_128(at + step * i) for i in range(3)])
            bias.append(dt_bias[head, channel + QUAD * r])
        rate = a_log[head]
        cute.arch.griddepcontrol_wait()

        begin = row_start[request]
        width = cutlass.min(row_start[request + 1] - begin, Int32(MAX_WIDTH))
        if const_expr(self.fold):
            slot = state_slots[request]
        else:
            slot = state_slots[request, 0]
        if (slot > 0) & (width > 0):
            # Lanes of rows that do not exist do as the last row's, and send nothing.
            row = cutlass.min(part, width - 1)
            told = accepted[request]
            source = slot
            if const_expr(not self.fold):
                taken = cutlass.min(cutlass.max(told, Int32(1)), slots_of_request)
                # Even a wrong count reads a slot that is there.
                source = cutlass.max(state_slots[request, taken - 1], Int32(0))
                target = state_slots[request, row]
            state_pitch = Int64(4) * state.stride[0]
            within = state.iterator.toint() + Int64(4 * DIM) * line + 16 * part
            state_at = within + state_pitch * source
            if const_expr(self.each == 1):
                loaded = self.load_state(state_at)

            #: Rows to fold, and the first of the three past taps in the window.
            if const_expr(self.fold):
                recorded = counts[slot, head, 0]
                overruns = counts[slot, head, 1]
                waiting = cutlass.min(cutlass.max(told, Int32(0)), recorded)
                old = cutlass.min(part, cutlass.max(waiting - 1, Int32(0)))
                oldest = waiting
            else:
                waiting = Int32(0)
                oldest = taken - 1
            pitch = Int64(2) * packed.stride[0]
            packed_at = packed.iterator.toint() + pitch * begin
            own_at = packed_at + pitch * row
            f_at = packed_at + pitch * cutlass.min(thread // 16, width - 1)
            f_at = f_at + Int64(8 * DIM) * heads + 16 * (thread % 16)
            f_live = Int32(thread < 16 * MAX_WIDTH)
            f_words = ptx.load_global_128_if(f_at, f_live)
            window_pitch = Int64(2) * window.stride[1]
            window_at = (
                window.iterator.toint()
                + Int64(2) * window.stride[0] * slot
                + window_pitch * oldest
            )
            lines = []
            for r in cutlass.range_constexpr(self.each):
                of_kinds = []
                for kind in cutlass.range_constexpr(3):
                    column = kind * heads * DIM + line + QUAD * r
                    found = []
                    for i in cutlass.range_constexpr(TAPS):
                        back = row - (TAPS - 1 - i)
                        place = cutlass.select_(
                            back >= 0,
                            packed_at + pitch * back,
                            window_at + window_pitch * (TAPS - 1 + back),
                        )
                        found.append(self.bf16_at(place, column))
                    of_kinds.append(found)
                lines.append(of_kinds)
            beta = sigmoid(self.bf16_at(own_at, heads * (4 * DIM) + DIM + head))
            old_u = []
            old_vectors = []
            if const_expr(self.fold):
                for r in cutlass.range_constexpr(self.each):
                    c = channel + QUAD * r
                    old_u.append(u[slot, head, old, c])
                    old_vectors.append(
                        (key[slot, head, old, c], decay[slot, head, old, c])
                    )

            ptx.store_shared_128_if(base + self.f_at + 16 * thread, f_live, f_words)
            share = base + self.share_at + part * self.pitch + 4 * local
            values = []
            for r in cutlass.range_constexpr(self.each):
                ours = share + 4 * QUAD * r
                for kind in cutlass.range_constexpr(2):
                    self.share(ours, kind, self.convolve(lines[r][kind], taps[r][kind]))
                values.append(self.convolve(lines[r][2], taps[r][2]))
                if const_expr(self.fold):
                    self.share(ours, OLD_KEY, old_vectors[r][0])
                    self.share(ours, OLD_DECAY, old_vectors[r][1])
            cute.arch.sync_threads()
            if thread < 32 * (self.channels // 16):
                self.project(base, thread // 32, lane)
            if part < width:
                for r in cutlass.range_constexpr(self.each):
                    for kind in cutlass.range_constexpr(3):
                        self.keep(
                            window,
                            slot,
                            part,
                            lines[r][kind],
                            kind * heads * DIM + line + QUAD * r,
                        )
            # Later with two channels: their rows would not fit the registers beside the
            # window's, and other CTAs of the SM have loads under way.
            if const_expr(self.each > 1):
                loaded = self.load_state(state_at)
            cute.arch.sync_threads()
            steepness = exp_of(rate)
            decays = []
            for r in cutlass.range_constexpr(self.each):
                ours = share + 4 * QUAD * r
                raw = self.element(ours + DECAY * MAX_WIDTH * self.pitch)[0]
                low_rank, _ = halves(ptx.pack_bf16x2(raw, raw))
                g = lower_bound * sigmoid(steepness * (low_rank + bias[r]))
                decays.append(exp_of(g))
                self.share(ours, DECAY, decays[r])
            cute.arch.cluster_wait()
            cute.arch.sync_threads()
            self.send(base, rank, thread // 32, lane, width, waiting)
            if thread == 0:
                size = ROW_BYTES * (3 * width + 2 * waiting)
                cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(base), size)
                size = 4 * QUADS * width
                cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(base + 8), size)
            if const_expr(self.fold):  # noqa: SIM102
                if part < width:
                    for r in cutlass.range_constexpr(self.each):
                        decay[slot, head, part, channel + QUAD * r] = decays[r]
            ptx.wait_cluster(base, 0)

            record = Int64(0)
            if const_expr(self.fold):
                if (thread == 0) & (rank == 0):
                    counts[slot, head, 0] = width
                    if told > recorded:
                        counts[slot, head, 1] = overruns + 1
                record = key.iterator.toint() + Int64(4) * key.stride[0] * slot
                record = record + ROW_BYTES * MAX_WIDTH * head
            if thread < 2 * MAX_WIDTH * PARTS:
                self.normalise(base, thread // PARTS, part, rank, width, record)
            cute.arch.sync_threads()

            # S, and of row t lane t's u and o; of every channel of the thread.
            s = cute.make_rmem_tensor((self.each * COLUMNS,), Float32)
            own_u = cute.make_rmem_tensor((self.each,), Float32)
            own_o = cute.make_rmem_tensor((self.each,), Float32)
            for r in cutlass.range_constexpr(self.each):
                own_u[r] = Float32(0.0)
                own_o[r] = Float32(0.0)
            for j in cutlass.range_constexpr(self.each * COLUMNS):
                s[j] = ptx.float_from_bits(loaded[j // 4][j % 4])
            first = lane - part
            columns = base + self.all_at + 16 * part
            if const_expr(self.fold):
                for t in cutlass.range(waiting, unroll=1):
                    a = self.columns(columns, OLD_DECAY, t)
                    k = self.columns(columns, OLD_KEY, t)
                    for r in cutlass.range_constexpr(self.each):
                        u_t = cute.arch.shuffle_sync(old_u[r], first + t)
                        for j in cutlass.range_constexpr(COLUMNS):
                            n = COLUMNS * r + j
                            s[n] = cute.math.fma(u_t, k[j], s[n] * a[j])
                if waiting > 0:
                    self.store_state(state_at, s)
            for t in cutlass.range(width, unroll=1):
                a = self.columns(columns, DECAY, t)
                k = self.columns(columns, KEY, t)
                beta_t = cute.arch.shuffle_sync(beta, first + t)
                changes = []
                for r in cutlass.range_constexpr(self.each):
                    n = COLUMNS * r
                    v_t = cute.arch.shuffle_sync(values[r], first + t)
                    old_s = [s[n + j] * a[j] for j in range(COLUMNS)]
                    u_t = beta_t * (v_t - over_parts(dot(old_s, k)))
                    for j in cutlass.range_constexpr(COLUMNS):
                        s[n + j] = cute.math.fma(u_t, k[j], old_s[j])
                    changes.append(u_t)
                q = self.columns(columns, QUERY, t)
                for r in cutlass.range_constexpr(self.each):
                    new_s = [s[COLUMNS * r + j] for j in range(COLUMNS)]
                    o_t = over_parts(dot(new_s, q))
                    own_u[r] = cutlass.select_(part == t, changes[r], own_u[r])
                    own_o[r] = cutlass.select_(part == t, o_t, own_o[r])
                if const_expr(not self.fold):
                    there = cute.arch.shuffle_sync(target, first + t)
                    if there > 0:
                        self.store_state(within + state_pitch * there, s)

            # Loads that go with the exchange.
            gates = []
            scale = []
            for r in cutlass.range_constexpr(self.each):
                column = 3 * heads * DIM + line + QUAD * r
                gates.append(packed[begin + row, column].to(Float32))
                scale.append(norm[channel + QUAD * r])
            place = base + self.squares_at + SQUARES_PITCH * part
            for r in cutlass.range_constexpr(self.each):
                square = cute.math.fma(own_o[r], own_o[r], Float32(0.0))
                square = square + cute.arch.shuffle_sync_bfly(square, offset=8)
                square = square + cute.arch.shuffle_sync_bfly(square, offset=16)
                quad = place + 4 * (channel // QUAD + r)
                for turn in cutlass.range_constexpr((self.ctas + 3) // 4):
                    peer = lane // PARTS + 4 * turn
                    if (part < width) & (peer < self.ctas):
                        ptx.store_remote_f32(quad, square, base + 8, peer)
            if const_expr(self.fold):  # noqa: SIM102
                if part < width:
                    for r in cutlass.range_constexpr(self.each):
                        u[slot, head, part, channel + QUAD * r] = own_u[r]
            ptx.wait_cluster(base + 8, 0)
            sums = [ptx.load_shared_f32x4(place, 16 * i) for i in range(QUADS // 4)]
            total = add_tree([x for four in sums for x in four])
            mean = cute.math.fma(total, Float32(1.0 / DIM), eps)
            spread = cute.math.rsqrt(mean, fastmath=True)
            if part < width:
                for r in cutlass.range_constexpr(self.each):
                    y = own_o[r] * spread * scale[r] * sigmoid(gates[r])
                    out[begin + part, head, channel + QUAD * r] = y.to(BFloat16)
        else:
            cute.arch.cluster_wait()
            # The copy must not come to a CTA that has left.
            cute.arch.mbarrier_wait(self.barrier(base + 16), 0)
            if (slot <= 0) & (part < width):
                for r in cutlass.range_constexpr(self.each):
                    out[begin + part, head, channel + QUAD * r] = BFloat16(0.0)

    @cute.jit
    def barrier(self, address):
        return cute.make_ptr(
            cutlass.Int64, address, cute.AddressSpace.smem, assumed_align=8
        )

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
    def convolve(self, line, words):
        """SiLU of the convolution."""
        taps = [ptx.float_from_bits(word) for word in words]
        total = taps[0] * line[0]
        for i in cutlass.range_constexpr(1, TAPS):
            total = cute.math.fma(taps[i], line[i], total)
        return total * sigmoid(total)

    @cute.jit
    def share(self, share, kind, value):
        """Lane t's value of row t to this CTA's part of the exchange."""
        ptx.store_shared_f32(share + kind * MAX_WIDTH * self.pitch, value)

    @cute.jit
    def project(self, base, tile, lane):
        """W_fb f_a of a warp's 16 channels for eight rows, to the decay's place in this
        CTA's share; columns of K in the same permutation of both."""
        cute.arch.mbarrier_wait(self.barrier(base + 16), 0)
        row = lane // 4
        within = 2 * DIM * row + 16 * (lane % 4)
        weights = base + self.weights_at + 16 * 2 * DIM * tile + within
        tokens = base + self.f_at + within
        zero = Float32(0.0)
        sums = [(zero, zero, zero, zero)] * 2
        for i in cutlass.range_constexpr(4):
            low = ptx.load_shared_128(weights, 64 * i)
            high = ptx.load_shared_128(weights, 64 * i + 8 * 2 * DIM)
            x = ptx.load_shared_128(tokens, 64 * i)
            for j in cutlass.range_constexpr(2):
                a = (low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1])
                sums[j] = ptx.mma_16816(a, (x[2 * j], x[2 * j + 1]), sums[j])
        place = base + self.share_at + DECAY * MAX_WIDTH * self.pitch
        place = place + 2 * (lane % 4) * self.pitch + 4 * (16 * tile + row)
        for i in cutlass.range_constexpr(4):
            offset = (i % 2) * self.pitch + 4 * 8 * (i // 2)
            ptx.store_shared_f32(place + offset, sums[0][i] + sums[1][i])

    @cute.jit
    def element(self, address):
        """A Float32 of shared memory."""
        pointer = cute.make_ptr(
            Float32, address, cute.AddressSpace.smem, assumed_align=4
        )
        return cute.make_tensor(pointer, cute.make_layout(1))

    @cute.jit
    def send(self, base, rank, warp, lane, width, waiting):
        """This CTA's channels of every row to all CTAs; a row's are 32 requests."""
        peer = lane % self.ctas
        quad = lane // self.ctas
        for kind in cutlass.range_constexpr(self.kinds):
            count = width if kind < OLD_KEY else waiting
            mine = base + self.share_at + kind * MAX_WIDTH * self.pitch + 16 * quad
            there = base + self.all_at + kind * KIND_BYTES + 16 * quad
            there = there + 4 * self.channels * rank
            for row in cutlass.range(warp, count, self.warps, unroll=1):
                found = ptx.load_shared_f32x4(mine + self.pitch * row)
                ptx.store_remote_f32x4(there + ROW_BYTES * row, found, base, peer)

    @cute.jit
    def normalise(self, base, vector, part, rank, width, record):
        """Queries and keys to unit length, in place; eight lanes a vector. Where the
        keys are recorded, from ``record`` on, it is done by one CTA a row."""
        kind = vector % 2
        row = vector // 2
        at = base + self.all_at + kind * KIND_BYTES + ROW_BYTES * row + 16 * part
        x = [v for i in range(4) for v in ptx.load_shared_f32x4(at, 128 * i)]
        total = over_parts(dot(x, x)) + L2_EPS
        unit = cute.math.rsqrt(total, fastmath=True)
        unit = cutlass.select_(kind == QUERY, unit * DIM**-0.5, unit)
        live = Int32(row < width)
        for i in cutlass.range_constexpr(4):
            words = [ptx.float_bits(x[4 * i + j] * unit) for j in range(4)]
            ptx.store_shared_128_if(at + 128 * i, live, words)
            if const_expr(self.fold):  # noqa: SIM102
                if (row < width) & (kind == KEY) & (row % self.ctas == rank):
                    address = record + ROW_BYTES * row + 16 * part
                    ptx.store_global_128(address + 128 * i, words)

    @cute.jit
    def load_state(self, address):
        return [
            ptx.load_global_128(address, 4 * DIM * QUAD * (i // 4) + 128 * (i % 4))
            for i in range(4 * self.each)
        ]

    @cute.jit
    def store_state(self, address, s):
        for i in cutlass.range_constexpr(4 * self.each):
            words = [ptx.float_bits(s[4 * i + j]) for j in range(4)]
            offset = 4 * DIM * QUAD * (i // 4) + 128 * (i % 4)
            ptx.store_global_128(address + offset, words)

    @cute.jit
    def keep(self, window, slot, part, line, column):
        """A row's projection to the window, and the taps before row 0."""
        if part == 0:
            for i in cutlass.range_constexpr(self.past):
                tap = line[TAPS - 1 - self.past + i]
                window[slot, i, column] = tap.to(BFloat16)
        window[slot, self.past + part, column] = line[TAPS - 1].to(BFloat16)

    @cute.jit
    def columns(self, columns, kind, row):
        """This lane's 16 columns of a vector."""
        at = columns + kind * KIND_BYTES + ROW_BYTES * row
        return [v for i in range(4) for v in ptx.load_shared_f32x4(at, 128 * i)]
