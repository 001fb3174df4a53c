# SPDX-License-Identifier: Apache-2.0
"""KDA verify, one launch from the packed projection to the gated output.

A cluster of C CTAs owns one head of one request, and a CTA 128 / C channels of it: that
many rows of the state S [V, K]. What the head's rows need besides is little, so every
CTA computes it whole; only the norm's sums cross the cluster.

    loads        into shared memory, as early as their addresses are known: by bulk
                 copies the convolution's taps, the CTA's part of the state and the
                 records that wait to be folded; by plain loads of all threads the rows'
                 q, k, v, gate and f_a and the window's taps, at the place that the
                 accepted count says, loaded again if fewer rows were recorded
    vectors      a warp a row: convolution, SiLU, unit length of q and k, and q k
    decay        W_fb f_a by mma.sync, rounded to bf16, then e^g; 16 channels a warp
    fold         the accepted rows of the last step are applied; the state is stored
    recurrence   the new rows; the state after each is stored in snapshots, which fold
                 nothing. With D = S diag(a): u = beta (v - D k), o = D q + u (k q), so
                 that both sums of a row cross the lanes at once; then S = D + u k^T
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
exchange of the norm's sums, when all of them have; a single CTA writes it once its
threads have met. No trailing cluster barrier is needed: a CTA leaves only when all that
its peers send it has come, and nothing reads a peer's memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from verify_kernels.common import ptx
from verify_kernels.kda.device import dot, over_lanes, sigmoid, sums_of_channels
from verify_kernels.kda.parts import (
    COLUMNS,
    DIM,
    ENTRY_BYTES,
    KIND_BYTES,
    LINE_BYTES,
    MAX_WIDTH,
    OLD_U,
    PARTS,
    QUAD,
    QUADS,
    SIXTEEN,
    SQUARES_FULL,
    STATE_FULL,
    TAPS,
    TAPS_FULL,
    THREADS,
    VALUE,
    VECTOR_BYTES,
    KdaParts,
)


class KdaKernel(KdaParts):
    """For any number of heads and requests.

    Args:
        ctas: C, CTAs of a cluster: 1, 2, 4 or 8.
        fold: the layout of `KdaFoldState`; else a snapshot a row, in vLLM's slots.
        rolling: vLLM's window, c[0 ..]: the taps before row 0 are c[a - 1 .. a + 1], a
            the accepted count and 1 at least; else that of `KdaFoldState`. Snapshots
            have no other. ``state_slots`` is a table [B, S] then, and a fold reads its
            first column.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    early_loads = ("w_fb", "conv", "a_log", "dt_bias", "norm")
    threads = THREADS

    def __init__(self, ctas: int, fold: bool, rolling: bool):
        super().__init__(ctas, fold, rolling)
        records = ("u", "key", "decay", "counts") if fold else ()
        self.parameters = (
            "packed",
            *self.early_loads,
            "row_start",
            "state_slots",
            "accepted",
            "state",
            "window",
            *records,
            "out",
        )

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
            for i in cutlass.range_constexpr(3):
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
        scales = self.scales(norm, rank, lane)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        # Not earlier: launches that let the next one in before they have waited pile
        # up, and what runs then shares SMs with what waits (12 heads, one request of 8
        # rows: 9.3 us in a chain, 7.4 launched plainly; H200, 2026-11-30).
        cute.arch.griddepcontrol_launch_dependents()

        begin = row_start[request]
        width = cutlass.min(row_start[request + 1] - begin, Int32(MAX_WIDTH))
        told = accepted[request]
        if const_expr(not self.rolling):
            slot = state_slots[request]
        elif const_expr(self.fold):
            slot = state_slots[request, 0]
        else:
            last = slots_of_request - 1
            snapshot = state_slots[request, cutlass.min(lane % MAX_WIDTH, last)]
            slot = cute.arch.shuffle_sync(snapshot, 0)
        if (slot > 0) & (width > 0):
            #: The first of the three past taps in the window.
            if const_expr(self.fold):
                source = slot
                #: Rows to fold, if there are so many.
                most = cutlass.max(told, Int32(self.least))
                most = cutlass.min(most, Int32(MAX_WIDTH))
                oldest = most - self.least
            else:
                oldest = cutlass.min(cutlass.max(told, Int32(1)) - 1, last)
                # Even a wrong count reads a slot that is there.
                source = cutlass.max(cute.arch.shuffle_sync(snapshot, oldest), Int32(0))
            pitch = Int64(2) * packed.stride[0]
            packed_at = packed.iterator.toint() + pitch * begin
            window_pitch = Int64(2) * window.stride[1]
            window_at = window.iterator.toint() + Int64(2) * window.stride[0] * slot
            window_at = window_at + Int64(LINE_BYTES) * head
            state_pitch = Int64(4) * state.stride[0]
            within = state.iterator.toint() + Int64(VECTOR_BYTES) * (
                head * DIM + rank * self.channels
            )
            kind_bytes = Int64(LINE_BYTES) * heads
            if thread == 32:
                size = self.channels * VECTOR_BYTES
                from_at = within + state_pitch * source
                ptx.bulk_load(base + self.state_at, from_at, size, base + STATE_FULL)

            # Sixteen threads a line of 256 bytes. Bulk copies would be issued one after
            # the other, 40 of them for 8 rows.
            group = thread // 16
            chunk = 16 * (thread % 16)
            line_at = packed_at + Int64(LINE_BYTES) * head + kind_bytes * (group % 4)
            rows = []
            for i in cutlass.range_constexpr(2):
                row = group // 4 + 4 * i
                live = Int32(row < width)
                row_at = line_at + pitch * row + chunk
                rows.append((row, live, ptx.load_global_128_if(row_at, live)))
            row = cutlass.min(group, width - 1)
            live_f = Int32(group < MAX_WIDTH)
            line_at = packed_at + pitch * row + 4 * kind_bytes + chunk
            f_words = ptx.load_global_128_if(line_at, live_f)
            tap = (group * 11) >> 5
            live_tap = Int32(group < 3 * (TAPS - 1))
            tap_at = window_at + kind_bytes * (group - 3 * tap) + chunk
            tap_words = ptx.load_global_128_if(
                tap_at + window_pitch * (oldest + tap), live_tap
            )
            if (warp == 2) & (lane < MAX_WIDTH):
                row = cutlass.min(lane, width - 1)
                own_at = packed_at + pitch * row
                beta = self.bf16_at(own_at + 4 * kind_bytes + LINE_BYTES, head)
                ptx.store_shared_f32(base + self.betas_at + 4 * lane, sigmoid(beta))
                if const_expr(not self.fold):
                    targets = self.shared(base + self.targets_at + 4 * lane, Int32, 1)
                    targets[0] = snapshot

            waiting = Int32(0)
            if const_expr(self.fold):
                recorded = counts[slot, head, 0]
                if const_expr(self.rolling):
                    # Of a slot that held something else before.
                    recorded = cutlass.max(recorded, Int32(0))
                waiting = cutlass.min(most, recorded)
                first = self.first_tap(waiting)
                # More were told accepted than there were rows.
                if first < oldest:
                    tap_words = ptx.load_global_128_if(
                        tap_at + window_pitch * (first + tap), live_tap
                    )
                copied = waiting
                if warp == 1:
                    # Of one lane, so that no more is waited for than is copied even if
                    # another request writes the count, in the same slot by mistake.
                    copied = cute.arch.shuffle_sync(waiting, 0)
                if (warp == 1) & (lane < 3) & (copied > 0):
                    from_at = self.slot_of(u, slot)
                    if lane == 1:
                        from_at = self.slot_of(key, slot)
                    if lane == 2:
                        from_at = self.slot_of(decay, slot)
                    from_at = from_at + KIND_BYTES * Int64(head)
                    place = base + self.vectors_at + KIND_BYTES * (OLD_U + lane)
                    size = VECTOR_BYTES * copied
                    ptx.bulk_load(place, from_at, size, base + STATE_FULL)
                if thread == 32:
                    size = self.channels * VECTOR_BYTES + 3 * VECTOR_BYTES * copied
                    self.expect(base + STATE_FULL, size)
            else:
                if thread == 32:
                    self.expect(base + STATE_FULL, self.channels * VECTOR_BYTES)
            if const_expr(self.ctas > 1):
                size = 4 * QUADS * width
                if thread == 0:
                    self.expect(base + SQUARES_FULL, size)
            for row, live, line_words in rows:
                at = ENTRY_BYTES * (TAPS - 1 + row) + LINE_BYTES * (group % 4)
                place = base + self.lines_at + at
                if group % 4 == 3:
                    place = base + self.gates_at + LINE_BYTES * row
                ptx.store_shared_128_if(place + chunk, live, line_words)
            place = base + self.f_at + LINE_BYTES * group + chunk
            ptx.store_shared_128_if(place, live_f, f_words)
            place = base + self.lines_at + LINE_BYTES * group + chunk
            ptx.store_shared_128_if(place, live_tap, tap_words)
            cute.arch.sync_threads()

            cute.arch.mbarrier_wait(self.barrier(base + TAPS_FULL), 0)
            if warp < width:
                self.vectors(base, warp, lane)
            self.decays(base, filter_row, words, bias, rate, lower_bound, lane)
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(self.barrier(base + STATE_FULL), 0)
            # Nobody else reads what this replaces, and the registers are still there.
            if const_expr(self.ctas == 1):
                self.record(base, window, key, decay, slot, head, width, thread)
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
            #: The channel of the sum that this lane holds, of its sixteen's E: with the
            #: key in lanes 0 to 7, with the query in the others.
            own = base + self.vectors_at + 4 * (channel + part % 8 // self.span)
            of_query = part >= 8
            if const_expr(self.fold):
                changes = base + self.vectors_at + OLD_U * KIND_BYTES + 4 * channel
                self.fold_rows(s, columns, changes, waiting)
                if waiting > 0:
                    self.store_state(state_at + state_pitch * slot, s)
                cute.arch.sync_warp()
            row = cute.make_rmem_tensor((3 * COLUMNS,), Float32)
            if const_expr(self.ahead):
                self.fetch(row, columns, 0)
            for t in cutlass.range(width, unroll=1):
                if const_expr(not self.ahead):
                    self.fetch(row, columns, t)
                own_t = own + VECTOR_BYTES * t
                v_t = self.element(own_t + VALUE * KIND_BYTES)[0]
                beta_t = self.element(base + self.betas_at + 4 * t)[0]
                product_t = self.element(base + self.products_at + 4 * t)[0]
                if const_expr(not self.fold):
                    there = self.element(base + self.targets_at + 4 * t, Int32)[0]
                a, k, q = [
                    [row[COLUMNS * n + j] for j in range(COLUMNS)] for n in range(3)
                ]
                if const_expr(self.ahead):
                    self.fetch(row, columns, cutlass.min(t + 1, width - 1))
                with_key, with_query = [], []
                for r in cutlass.range_constexpr(self.each):
                    for j in cutlass.range_constexpr(COLUMNS):
                        s[COLUMNS * r + j] = s[COLUMNS * r + j] * a[j]
                    channel_s = [s[COLUMNS * r + j] for j in range(COLUMNS)]
                    with_key.append(dot(channel_s, k))
                    with_query.append(dot(channel_s, q))
                if const_expr(self.each == 1):
                    sums = over_lanes([*with_key, *with_query], (8, 4, 2, 1))
                    u_own = beta_t * (v_t - sums[0])
                    o_own = cute.math.fma(u_own, product_t, sums[1])
                else:
                    found = sums_of_channels([*with_key, *with_query], part)
                    u_own = beta_t * (v_t - found)
                    u_there = cute.arch.shuffle_sync_bfly(u_own, offset=8)
                    o_own = cute.math.fma(u_there, product_t, found)
                for r in cutlass.range_constexpr(self.each):
                    u_t = u_own
                    if const_expr(self.each > 1):
                        u_t = cute.arch.shuffle_sync(
                            u_own, self.span * r, mask_and_clamp=SIXTEEN
                        )
                    for j in cutlass.range_constexpr(COLUMNS):
                        n = COLUMNS * r + j
                        s[n] = cute.math.fma(u_t, k[j], s[n])
                place = own_t - self.vectors_at + self.outputs_at
                if const_expr(self.fold):
                    old_at = own_t + OLD_U * KIND_BYTES
                    place = cutlass.select_(of_query, place, old_at)
                    o_own = cutlass.select_(of_query, o_own, u_own)
                    stores = part % self.span == 0
                else:
                    stores = of_query & (part % self.span == 0)
                if stores:
                    ptx.store_shared_f32(place, o_own)
                if const_expr(not self.fold):
                    self.store_snapshot(state_at, state_pitch, there, s)
            cute.arch.sync_threads()
            if const_expr(self.ctas > 1):
                # The peers' barriers are there.
                cute.arch.cluster_wait()
            if thread >> 5 < width:
                self.finish(base, scales, out, begin, head, rank, thread, eps)
            if const_expr(self.ctas > 1):
                ptx.wait_cluster(base + SQUARES_FULL, 0)
                self.record(base, window, key, decay, slot, head, width, thread)
                if const_expr(self.fold):
                    self.count(counts, slot, head, width, told)
            if const_expr(self.fold):
                self.record_changes(base, u, slot, head, width, thread)
        else:
            if const_expr(self.ctas > 1):
                cute.arch.cluster_wait()
            # The copies must not come to a CTA that has left.
            cute.arch.mbarrier_wait(self.barrier(base + TAPS_FULL), 0)
            if (slot <= 0) & (warp < width) & (lane < self.chunks):
                line = cute.make_rmem_tensor((QUAD,), BFloat16)
                line.fill(BFloat16(0.0))
                self.store_out(out, begin + warp, head, rank, lane, line)
