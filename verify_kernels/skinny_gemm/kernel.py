# SPDX-License-Identifier: Apache-2.0
"""Y_g[M, N_g] = X[M, K] W_g[N_g, K]^T for up to 64 tokens, weights streamed once.

The rows of all W_g count as one list. A cluster of C CTAs owns an equal run of it and
shares K: CTA r multiplies columns r K/C .. (r+1) K/C - 1, a tile of the run's rows at a
time, weights arriving through a ring of bulk copies. Warps by role:

    multiply    warp w sums its segment of every slice of K with m16n8k16, weights the
                16-row operand, tokens the 8 columns, and leaves the partial sums
    produce     fills the ring; touches static weights only
    reduce      adds the partials of a tile in the fixed order (tiling.py); with C = 1
                stores them, else sends each token's sum to the CTA that finishes it
    finish      (C > 1) adds the cluster's sums of this CTA's tokens and stores them

A lane's 16-byte reads are fragments as they are: with lane = 4 g + q, columns
32 c + 8 q of weight rows g, g + 8 and of token g feed two steps of 16, the same
permutation of k on both sides. Tokens past M repeat token M - 1; rows past a tile are
the slot's earlier bytes, rows past a slot repeat its last. Neither is stored, and no
row or column of a product depends on another.

Read once: every weight. Read by each cluster: X, into registers or shared memory for
the whole launch. Early loads: the weights, by the producing warp; everybody else waits
for earlier kernels first. Dependents are released at entry: they wait before they read.

No trailing cluster barrier is needed: a CTA has received every sum it waits for before
it leaves, and arrivals that nobody will wait for are not sent.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from verify_kernels.common import ptx
from verify_kernels.skinny_gemm.device import GemmKernel, add, add_tree, locate, store
from verify_kernels.skinny_gemm.tiling import ROW_TILE, Tiling

QUADS = ROW_TILE // 4


def add_in_order(values):
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total


def places_of_rows(t, g):
    """Where row g + 8 r of a slot is from row g on, for every r, as the lane's part and
    the constant part of a distance in bytes. Rows past the slot repeat its last row:
    what lies behind a slot is another's, and another may be writing it."""
    places = []
    for first in range(0, t.rows, 8):
        if first + 8 <= t.stage_rows:
            places.append((0, first * t.weight_pitch))
        else:
            row = cutlass.min(g + first, Int32(t.stage_rows - 1))
            places.append(((row - g) * t.weight_pitch, 0))
    return places


class SkinnyGemmKernel(GemmKernel):
    """One tiling, output types and number of weight matrices, for any N and M."""

    def __init__(self, tiling: Tiling, out_dtypes):
        super().__init__(tiling, out_dtypes)
        # X is written once, before it is read: reads of it may be under way when a
        # slot is handed back.
        ring_end = tiling.barrier_bytes + tiling.stages * tiling.stage_bytes
        self.kept_shared = ((ring_end, ring_end + tiling.token_bytes),)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [M, K], rows any multiple of 16 bytes apart
        ws: list,  # [N_g, K]
        ys: list,  # [M, N_g], rows any distance apart
        ctas: Int32,  # a multiple of the cluster
        pdl: Int32,
        stream,
    ):
        self.kernel(x, ws, ys).launch(
            grid=[ctas, 1, 1],
            block=[self.t.threads, 1, 1],
            cluster=[self.t.cluster, 1, 1] if self.t.cluster > 1 else None,
            smem=self.t.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=self.t.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, ws: list, ys: list):
        t = self.t
        m = x.shape[0]
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rank = block % t.cluster
        cluster = block // t.cluster
        clusters = Uint32(blocks // t.cluster)
        rows = Int32(0)
        for g in cutlass.range_constexpr(self.groups):
            rows = rows + ws[g].shape[0]
        # Unsigned: floor division of signed numbers also mends the sign.
        run = Int32(Uint32(rows) // clusters)
        longer = rows - run * Int32(clusters)
        first = cluster * run + cutlass.min(cluster, longer)
        last = first + run + Int32(cluster < longer)
        tiles = Int32(Uint32(last - first + t.stage_rows - 1) // t.stage_rows)
        # Tiles of nearly equal height: a last tile of one row costs a whole turn.
        height = Int32(
            Uint32(last - first + tiles - 1) // Uint32(cutlass.max(tiles, 1))
        )
        # Tokens this CTA finishes, and the bytes of their sums from the whole cluster.
        # A CTA without any gets 16 bytes from each, so that it cannot run ahead and
        # give the same buffer back twice in one phase.
        share = t.tokens // t.cluster
        own = cutlass.max(cutlass.min(m - rank * share, Int32(share)), Int32(0))
        incoming = cutlass.max(own * (ROW_TILE * 4), Int32(16)) * t.cluster

        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        x_full = base
        full = base + 8
        empty = full + 8 * t.stages
        part_full = empty + 8 * t.stages
        part_free = part_full + 8 * t.partial_buffers
        sums_full = part_free + 8 * t.partial_buffers
        sums_free = sums_full + 8 * t.exchange_buffers
        ring = base + t.barrier_bytes
        tokens = ring + t.stages * t.stage_bytes
        partials = tokens + t.token_bytes
        sums = partials + t.partial_buffers * t.partial_bytes

        cute.arch.griddepcontrol_launch_dependents()
        if warp == t.warps:
            with cute.arch.elect_one():
                self.init(x_full, 1, 1)
                self.init(full, t.stages, 1)
                self.init(empty, t.stages, t.warps)
                self.init(part_full, t.partial_buffers, 32 * t.warps)
                self.init(part_free, t.partial_buffers, 32 * t.reducers)
                self.init(sums_full, t.exchange_buffers, 1)
                self.init(sums_free, t.exchange_buffers, t.cluster)
                cute.arch.mbarrier_init_fence()
            # Also between a barrier's making and its first arrival: ptxas makes it from
            # the uniform datapath, and racecheck takes that for another lane of the
            # warp than the one that arrives.
            cute.arch.sync_warp()
            # The ring fills before anything is waited for.
            for i in cutlass.range(
                cutlass.min(tiles * t.stages_per_tile, t.stages), unroll=1
            ):
                self.fetch(ws, i, i, first, last, height, rank, ring, full)
            if const_expr(t.cluster > 1):
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(t.exchange_buffers):
                        self.expect(sums_full + 8 * i, incoming)
                cute.arch.sync_warp()
        cute.arch.sync_threads()
        if const_expr(t.cluster > 1):
            # The barriers' own fence made them visible; a releasing arrival would cost
            # a device-wide memory barrier.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        if warp == t.warps:
            self.produce(ws, tiles, first, last, height, rank, ring, full, empty)
        cute.arch.griddepcontrol_wait()
        if warp < t.warps:
            self.multiply(
                x, tiles, m, rank, warp, lane, ring, tokens, partials, x_full, full,
                empty, part_full, part_free,
            )  # fmt: skip
        elif (warp > t.warps) & (warp <= t.warps + t.reducers):
            if const_expr(t.held_tiles < t.token_tiles):  # noqa: SIM102
                if warp == t.warps + 1:
                    self.load_tokens(x, m, rank, tokens, x_full)
            self.reduce(
                ys, ws, tiles, first, last, height, m, rank, warp - t.warps - 1, lane,
                partials, sums, part_full, part_free, sums_full, sums_free,
            )  # fmt: skip
        elif warp > t.warps + t.reducers:
            self.finish(
                ys, ws, tiles, first, last, height, m, rank, lane, own, incoming, sums,
                sums_full, sums_free,
            )  # fmt: skip

    @cute.jit
    def barrier(self, address):
        return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)

    @cute.jit
    def init(self, address, number: cutlass.Constexpr, arrivals: cutlass.Constexpr):
        for i in cutlass.range_constexpr(number):
            cute.arch.mbarrier_init(self.barrier(address + 8 * i), arrivals)

    @cute.jit
    def expect(self, address, size):
        cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(address), size)

    @cute.jit
    def wait(self, address, phase):
        cute.arch.mbarrier_wait(self.barrier(address), phase)

    @cute.jit
    def fetch(self, ws, index, slot, first, last, height, rank, ring, full):
        """Asks for stage ``index`` of the launch: some columns of a tile's rows."""
        t = self.t
        width = t.span * t.slice_width
        start = first + index // t.stages_per_tile * height
        column = rank * t.local_k + index % t.stages_per_tile * width
        valid = cutlass.min(last - start, height)
        # One thread: a bulk copy is issued from uniform registers, so copies spread
        # over lanes would be taken one by one, each with a vote.
        with cute.arch.elect_one():
            self.expect(full + 8 * slot, valid * (width * 2))
            for row in cutlass.range(valid, unroll=1):
                ptx.bulk_load(
                    ring + slot * t.stage_bytes + row * t.weight_pitch,
                    locate(ws, start + row, t.k) + Int64(column * 2),
                    width * 2,
                    full + 8 * slot,
                )
        cute.arch.sync_warp()

    @cute.jit
    def produce(self, ws, tiles, first, last, height, rank, ring, full, empty):
        t = self.t
        slot = Int32(0)
        phase = Int32(0)
        for index in cutlass.range(t.stages, tiles * t.stages_per_tile, unroll=1):
            self.wait(empty + 8 * slot, phase)
            self.fetch(ws, index, slot, first, last, height, rank, ring, full)
            slot = slot + 1
            if slot == t.stages:
                slot = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def load_tokens(self, x, m, rank, tokens, x_full):
        """This CTA's columns of the tokens that no register holds, to shared memory."""
        t = self.t
        held = 8 * t.held_tiles
        count = cutlass.max(m - held, 0)
        size = t.local_k * 2
        with cute.arch.elect_one():
            self.expect(x_full, count * size)
            for token in cutlass.range(count, unroll=1):
                row = Int64(token + held) * (x.stride[0] * 2)
                ptx.bulk_load(
                    tokens + token * t.token_pitch,
                    x.iterator.toint() + row + Int64(rank * size),
                    size,
                    x_full,
                )
        cute.arch.sync_warp()

    @cute.jit
    def multiply(
        self, x, tiles, m, rank, warp, lane, ring, tokens, partials, x_full, full,
        empty, part_full, part_free,
    ):  # fmt: skip
        t = self.t
        g = lane // 4
        q = lane % 4
        zero = m >> 16  # m <= 64; the compiler does not know
        column = (warp * (t.chunks * 32) + q * 8) * 2
        at = cute.make_rmem_tensor((t.token_tiles,), Int32)
        held = cute.make_rmem_tensor(
            (4, t.chunks, max(t.held_tiles, 1), t.local_slices), Int32
        )
        for n in cutlass.range_constexpr(t.token_tiles):
            token = cutlass.min(n * 8 + g, m - 1)
            resident = cutlass.max(token - 8 * t.held_tiles, 0)
            at[n] = tokens + resident * t.token_pitch + column
            if const_expr(n < t.held_tiles):
                source = x.iterator.toint() + Int64(token) * (x.stride[0] * 2)
                source = source + Int64(rank * (t.local_k * 2) + column)
                for s in cutlass.range_constexpr(t.local_slices):
                    for c in cutlass.range_constexpr(t.chunks):
                        offset = s * t.slice_width * 2 + c * 64
                        words = ptx.load_global_128(source, offset)
                        for i in cutlass.range_constexpr(4):
                            held[i, c, n, s] = words[i]
        if const_expr(t.held_tiles < t.token_tiles):
            self.wait(x_full, 0)
        # Token 2q, row g of this warp's first partial tile.
        out = partials + 4 * (
            warp * (t.tokens * t.partial_pitch) + 2 * q * t.partial_pitch + g
        )
        acc = cute.make_rmem_tensor(
            (4, t.token_tiles, t.row_tiles, t.local_slices if t.row_tiles > 1 else 1),
            Float32,
        )
        begin = ring + g * t.weight_pitch + column
        places = places_of_rows(t, g)
        slot = Int32(0)
        phase = Int32(0)
        buffer = Int32(0)
        part_phase = Int32(1)
        for _ in cutlass.range(tiles, unroll=1):
            acc.fill(0.0)
            for s in cutlass.range_constexpr(t.local_slices):
                if const_expr(s % t.span == 0):
                    self.wait(full + 8 * slot, phase)
                    done = Int32(0)
                offset = s % t.span * (t.slice_width * 2)
                w_at = begin + slot * t.stage_bytes + offset
                self.segment(acc, w_at, places, at, held, s)
                # A sum needs every weight read into it. One loaded word would not do:
                # ptxas reorders the loads, so the last in program order may come first.
                # A product takes the registers of all lanes, so one lane's sum needs
                # what the others have read too, and that lane may arrive for them.
                for r in cutlass.range_constexpr(t.row_tiles):
                    k = s if t.row_tiles > 1 else 0
                    done = done | ptx.float_bits(acc[0, 0, r, k])
                if const_expr((s + 1) % t.span == 0):
                    if lane == 0:
                        ptx.arrive_after(empty + 8 * slot, done, zero)
                    slot = slot + 1
                    if slot == t.stages:
                        slot = Int32(0)
                        phase = phase ^ 1
                # One row tile: its slices leave as they come, in one set of registers.
                if const_expr(t.row_tiles == 1):
                    if const_expr(s == 0):
                        self.wait(part_free + 8 * buffer, part_phase)
                    self.store_partial(acc, 0, 0, out + buffer * t.partial_bytes, s)
                    acc.fill(0.0)
            for r in cutlass.range_constexpr(t.row_tiles):
                if const_expr(t.row_tiles > 1):
                    self.wait(part_free + 8 * buffer, part_phase)
                    for s in cutlass.range_constexpr(t.local_slices):
                        self.store_partial(acc, r, s, out + buffer * t.partial_bytes, s)
                # Every lane, for its own stores.
                cute.arch.mbarrier_arrive(self.barrier(part_full + 8 * buffer))
                buffer = buffer + 1
                if buffer == t.partial_buffers:
                    buffer = Int32(0)
                    part_phase = part_phase ^ 1

    @cute.jit
    def segment(self, acc, w_at, places, at, held, s: cutlass.Constexpr):
        """Adds this warp's segment of slice s to acc."""
        t = self.t
        k = s if t.row_tiles > 1 else 0
        for c in cutlass.range_constexpr(t.chunks):
            w = [
                ptx.load_shared_128(w_at + away, offset + c * 64)
                for away, offset in places
            ]
            for n in cutlass.range_constexpr(t.token_tiles):
                if const_expr(n < t.held_tiles):
                    xv = tuple(held[i, c, n, s] for i in range(4))
                else:
                    xv = ptx.load_shared_128(at[n], s * t.slice_width * 2 + c * 64)
                for r in cutlass.range_constexpr(t.row_tiles):
                    lo, hi = w[2 * r], w[2 * r + 1]
                    for h in cutlass.range_constexpr(2):
                        d = ptx.mma_16816(
                            (lo[2 * h], hi[2 * h], lo[2 * h + 1], hi[2 * h + 1]),
                            (xv[2 * h], xv[2 * h + 1]),
                            tuple(acc[i, n, r, k] for i in range(4)),
                        )
                        for i in cutlass.range_constexpr(4):
                            acc[i, n, r, k] = d[i]

    @cute.jit
    def store_partial(
        self, acc, r: cutlass.Constexpr, k: cutlass.Constexpr, at,
        s: cutlass.Constexpr,
    ):  # fmt: skip
        t = self.t
        at = at + s * (4 * t.warps * t.tokens * t.partial_pitch)
        tile = cute.make_tensor(
            cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4),
            cute.make_layout(
                (2, 2, t.token_tiles), stride=(t.partial_pitch, 8, 8 * t.partial_pitch)
            ),
        )
        for n in cutlass.range_constexpr(t.token_tiles):
            for i in cutlass.range_constexpr(4):
                tile[i % 2, i // 2, n] = acc[i, n, r, k]

    @cute.jit
    def reduce(
        self, ys, ws, tiles, first, last, height, m, rank, reducer, lane, partials,
        sums, part_full, part_free, sums_full, sums_free,
    ):  # fmt: skip
        """Adds the warps' partials of each 16-row block, 8 tokens a warp."""
        t = self.t
        share = t.tokens // t.cluster
        pitch = 4 * t.tokens * t.partial_pitch
        zero = m >> 16
        buffer = Int32(0)
        phase = Int32(0)
        there = Int32(0)
        free_phase = Int32(1)
        for unit in cutlass.range(tiles * t.row_tiles, unroll=1):
            self.wait(part_full + 8 * buffer, phase)
            # A reducer without a task must not wait: nobody waits for it, so the buffer
            # might be given back twice before it looks.
            if const_expr(t.cluster > 1):  # noqa: SIM102
                if reducer * 8 < m:
                    self.wait(sums_free + 8 * there, free_phase)
            done = Int32(0)
            # A warp takes 8 tokens and 16 rows; with the tokens along the lanes its
            # reads meet every bank once. Tokens past M repeat the last.
            for begin in cutlass.range(reducer * 8, m, 8 * t.reducers, unroll=1):
                live = begin + lane % 8 < m
                token = cutlass.min(begin + lane % 8, m - 1)
                quad = lane // 8
                at = partials + buffer * t.partial_bytes
                at = at + 4 * (token * t.partial_pitch + 4 * quad)
                parts = [
                    [
                        ptx.load_shared_f32x4(at, (s * t.warps + w) * pitch)
                        for w in range(t.warps)
                    ]
                    for s in range(t.local_slices)
                ]
                v = add_tree([add_in_order(p) for p in parts])
                done = done | ptx.float_bits(v[3])
                if live:
                    if const_expr(t.cluster > 1):
                        place = (rank * share + token % share) * ROW_TILE + 4 * quad
                        ptx.store_remote_f32x4(
                            sums + there * t.exchange_bytes + 4 * place,
                            v,
                            sums_full + 8 * there,
                            token // share,
                        )
                    else:
                        self.store(ys, ws, token, unit, quad, first, last, height, v)
            # Every lane, for its own reads: nothing here needs those of the others.
            ptx.arrive_after(part_free + 8 * buffer, done, zero)
            if const_expr(t.cluster > 1):
                idle = (lane < t.cluster) & (lane * share >= m)
                if idle & (reducer == 0):
                    ptx.store_remote_f32x4(
                        sums + there * t.exchange_bytes + 16 * rank,
                        (Float32(0.0),) * 4,
                        sums_full + 8 * there,
                        lane,
                    )
            buffer = buffer + 1
            if buffer == t.partial_buffers:
                buffer = Int32(0)
                phase = phase ^ 1
            there = there + 1
            if there == t.exchange_buffers:
                there = Int32(0)
                free_phase = free_phase ^ 1

    @cute.jit
    def finish(
        self, ys, ws, tiles, first, last, height, m, rank, lane, own, incoming, sums,
        sums_full, sums_free,
    ):  # fmt: skip
        """Adds the cluster's sums of this CTA's tokens and stores them."""
        t = self.t
        share = t.tokens // t.cluster
        zero = m >> 16
        tasks = own * QUADS
        buffer = Int32(0)
        phase = Int32(0)
        units = tiles * t.row_tiles
        for unit in cutlass.range(units, unroll=1):
            self.wait(sums_full + 8 * buffer, phase)
            done = Int32(0)
            for begin in cutlass.range(0, tasks, 32, unroll=1):
                task = begin + lane
                live = task < tasks
                task = cutlass.min(task, tasks - 1)
                token = task // QUADS
                quad = task % QUADS
                at = sums + buffer * t.exchange_bytes
                at = at + 4 * (token * ROW_TILE + 4 * quad)
                parts = [
                    ptx.load_shared_f32x4(at, r * share * ROW_TILE * 4)
                    for r in range(t.cluster)
                ]
                v = add_tree(parts)
                done = done | ptx.float_bits(v[3])
                if live:
                    self.store(
                        ys, ws, rank * share + token, unit, quad, first, last, height,
                        v,
                    )  # fmt: skip
            if unit + t.exchange_buffers < units:
                if lane == 0:
                    self.expect(sums_full + 8 * buffer, incoming)
                # A remote arrival of every lane at every CTA would be many, so a lane
                # arrives for all. The vote needs every lane's sums, and they what the
                # lane has read; that the warp has met would not say so.
                votes = cute.arch.vote_ballot_sync((done & zero) != 0)
                if lane < t.cluster:
                    ptx.arrive_remote_after(sums_free + 8 * buffer, lane, votes, zero)
            buffer = buffer + 1
            if buffer == t.exchange_buffers:
                buffer = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def store(self, ys, ws, token, unit, quad, first, last, height, v):
        """Four rows of one token; rows past the tile's height are the next tile's."""
        t = self.t
        tile = first + unit // t.row_tiles * height
        row = tile + unit % t.row_tiles * ROW_TILE + 4 * quad
        end = cutlass.min(tile + height, last)
        for e in cutlass.range_constexpr(4):
            if row + e < end:
                store(ys, ws, self.out_dtypes, token, row + e, v[e])
