# SPDX-License-Identifier: Apache-2.0
"""Y_g[M, N_g] = X[M, K] W_g[N_g, K]^T for many tokens: warpgroups own rows, X stays.

The rows of all W_g count as one list. A cluster of C CTAs owns an equal run of it and
shares K: CTA r multiplies columns r K/C .. (r+1) K/C - 1. In each turn a warp has a
block of the run, 16 rows at most, all blocks of nearly equal height; the four warps of
a warpgroup multiply together, 64 rows, and ``k_groups`` warpgroups of every CTA have
consecutive slices of K of the same blocks:

    copy        four warps of their own: X into shared memory, in the order in which a
                warpgroup's tensor cores read it (common/wgmma.py), a part of the
                columns after the other, each with a barrier
    load        weights, 16 bytes a lane and row straight into fragments, ``depth``
                steps of 32 columns ahead, on into the warp's next block
    multiply    a segment is one chain of steps of 16 columns: wgmma, or mma.sync where
                there is none, weights the operand in registers. The warp adds the
                segments of a slice in order, its slices in the balanced tree
    send        each tile of 8 tokens to the CTA that finishes it (C = 1: to shared
                memory; a warpgroup with all of K stores at once)
    finish      the warps that have copied X add the subtrees of all warpgroups, and
                store

So K is never split but by whole slices: no partial sums of segments pass through shared
memory. Its traffic is the reads of X by the tensor cores, once for 64 rows.

Tokens past M are zero, rows past a block anything at all. Neither is stored, and no row
or column of a product depends on another.

Read once: every weight. Read by each cluster: X, into shared memory for the whole
launch. Early loads: each warp's first weights. Dependents are released at entry: they
wait before they read. The host part divides the rows, so no lane divides before its
first load.

No trailing cluster barrier is needed: a CTA has received every sum and every arrival
that is sent to it before it leaves.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from verify_kernels.common import ptx, wgmma
from verify_kernels.skinny_gemm.device import (
    STREAM,
    GemmKernel,
    add_tree,
    locate,
    store,
)
from verify_kernels.skinny_gemm.wide_tiling import (
    CHUNK_BYTES,
    TILE_BYTES,
    WARPS,
    WideTiling,
)


class Place(NamedTuple):
    """Where a thread stands: its lane, its warp's place along the rows and along K, its
    CTA's rank in the cluster, and the cluster."""

    lane: Int32
    block: Int32
    group: Int32
    rank: Int32
    cluster: Int32


class WideGemmKernel(GemmKernel):
    """One tiling, output types and number of weight matrices, for any N and M."""

    def __init__(self, tiling: WideTiling, out_dtypes):
        super().__init__(tiling, out_dtypes)
        begin = tiling.barrier_bytes
        self.kept_shared = ((begin, begin + tiling.token_bytes),)

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
        t = self.t
        rows = Int32(0)
        for g in cutlass.range_constexpr(self.groups):
            rows = rows + ws[g].shape[0]
        clusters = ctas // t.cluster
        run = rows // clusters
        longer = rows - run * clusters
        turns = (run + Int32(longer > 0) + t.turn_rows - 1) // t.turn_rows
        height = run // cutlass.max(turns * t.row_blocks, 1)
        self.kernel(x, ws, ys, run, longer, turns, height).launch(
            grid=[ctas, 1, 1],
            block=[t.threads, 1, 1],
            cluster=[t.cluster, 1, 1] if t.cluster > 1 else None,
            smem=t.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=t.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        ws: list,
        ys: list,
        run: Int32,  # rows of a cluster
        longer: Int32,  # clusters with one row more
        turns: Int32,
        height: Int32,  # rows of a block, of some one more
    ):
        t = self.t
        cute.arch.griddepcontrol_launch_dependents()
        m = x.shape[0]
        division = run, longer, turns, height
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        multiplies = warp < WARPS * t.multipliers
        weights = self.hold()
        source = self.locate(ws, self.place(), 0, division)
        if multiplies:
            self.request(weights, source)
        else:
            self.make_barriers(m)
        if const_expr(t.cluster > 1):
            # The barriers' own fence made them visible; a releasing arrival would cost
            # a device-wide memory barrier.
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if const_expr(t.cluster > 1):
            cute.arch.cluster_wait()
        _, rows, _ = self.rows(self.place(), division)
        if multiplies:
            if const_expr(t.moves_registers):
                cute.arch.setmaxregister_increase(t.registers)
            if rows > 0:
                self.multiply(weights, source, ws, ys, division, m)
        else:
            if const_expr(t.moves_registers):
                cute.arch.setmaxregister_decrease(t.copy_registers)
            if rows > 0:
                self.serve(x, ws, ys, division, m)

    def hold(self):
        """Registers of weights in flight."""
        return cute.make_rmem_tensor((4, 2, self.t.depth), Int32)

    def request(self, weights, source):
        """The first weights."""
        for i in range(self.t.depth):
            self.load(weights, i, source, i)

    def serve(self, x, ws, ys, division, m):
        """What the warps that do not multiply do."""
        self.copy_tokens(x, m)
        if const_expr(self.t.contributors > 1):
            self.finish(ws, ys, division, m)

    def place(self):
        """Found anew where it is needed: kept, it costs registers while the warp
        multiplies. A warp that copies and finishes has the first blocks too."""
        t = self.t
        warp = Uint32(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        cta = Uint32(cute.arch.block_idx()[0])
        return Place(
            cute.arch.lane_idx(),
            Int32(warp % t.row_blocks),
            Int32(warp // t.row_blocks),
            Int32(cta % t.cluster),
            Int32(cta // t.cluster),
        )

    def rows(self, place, division):
        """First row of the cluster's run, its rows, and its blocks of one row more."""
        run, longer, turns, height = division
        first = place.cluster * run + cutlass.min(place.cluster, longer)
        rows = run + Int32(place.cluster < longer)
        return first, rows, rows - height * (turns * self.t.row_blocks)

    def bounds(self, place, turn, division):
        """First row of a block of a turn, and the row after its last."""
        first, _, higher = self.rows(place, division)
        height = division[3]
        block = place.block + turn * self.t.row_blocks
        start = first + block * height + cutlass.min(block, higher)
        return start, start + height + Int32(block < higher)

    def own(self, place, m):
        """Tiles of tokens below m that this CTA finishes."""
        t = self.t
        tiles = ((m + 7) >> 3) - place.rank * t.own_tiles
        return cutlass.min(cutlass.max(tiles, 0), t.own_tiles)

    # Shared memory: barriers of X, one a part; of sums that have come and of sums that
    # have been read, one a block each; X; sums by block, tile, and sender.

    def base(self):
        return cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()

    def x_full(self, part):
        return self.base() + 8 * part

    def x_barriers(self):
        """Barriers of X."""
        return self.t.parts

    def sums_full(self, block):
        return self.base() + 8 * (self.x_barriers() + block)

    def sums_free(self, block):
        return self.base() + 8 * (self.x_barriers() + self.t.row_blocks + block)

    def tokens(self):
        return self.base() + self.t.barrier_bytes

    def sums(self, place, tile):
        t = self.t
        number = place.block * t.own_tiles + tile
        start = self.base() + t.barrier_bytes + t.token_bytes + 16 * place.lane
        return start + number * (t.contributors * TILE_BYTES)

    def copier(self):
        """Number of a warp among those that copy."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return warp - WARPS * self.t.multipliers

    @cute.jit
    def make_barriers(self, m):
        """Each warp that copies makes every fourth."""
        t = self.t
        warp = self.copier()
        own = self.own(self.place(), m)
        # CTAs of the cluster that finish tiles.
        everybody = ((m + 7) >> 3) + t.own_tiles - 1
        everybody = Int32(Uint32(everybody) // t.own_tiles)
        with cute.arch.elect_one():
            self.make_x_barriers(warp)
            if const_expr(t.contributors > 1):
                for i in cutlass.range_constexpr(0, t.row_blocks, WARPS):
                    self.init(self.sums_free(i + warp), everybody)
                    arrivals = 32 * t.k_groups if t.cluster == 1 else 1
                    self.init(self.sums_full(i + warp), arrivals)
            cute.arch.mbarrier_init_fence()
            if const_expr(t.cluster > 1):  # noqa: SIM102
                if own > 0:
                    for i in cutlass.range_constexpr(0, t.row_blocks, WARPS):
                        self.expect_sums(i + warp, own)
        cute.arch.sync_warp()

    @cute.jit
    def make_x_barriers(self, warp):
        t = self.t
        for i in cutlass.range_constexpr(0, t.parts, WARPS):
            if i + warp < t.parts:
                self.init(self.x_full(i + warp), 32 * WARPS)

    def barrier(self, address):
        return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)

    def init(self, address, arrivals):
        cute.arch.mbarrier_init(self.barrier(address), arrivals)

    def wait(self, address, phase):
        cute.arch.mbarrier_wait(self.barrier(address), phase)

    def expect_sums(self, block, own):
        size = own * (self.t.contributors * TILE_BYTES)
        full = self.barrier(self.sums_full(block))
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    @cute.jit
    def locate(self, ws, place, turn, division):
        """Addresses of this lane's bytes of rows g and g + 8 of its block of a turn,
        and how many rows there are from g on."""
        t = self.t
        start, end = self.bounds(place, turn, division)
        end = cutlass.select_(turn < division[2], end, start)
        column = place.rank * t.local_k + place.group * t.unit_k + place.lane % 4 * 8
        addresses = []
        for half in cutlass.range_constexpr(2):
            row = start + place.lane // 4 + 8 * half
            addresses.append(locate(ws, row, t.k) + Int64(column * 2))
        return addresses[0], addresses[1], end - start - place.lane // 4

    def load(self, weights, slot, source, chunk, old=False):
        """Asks for 32 columns of a block, where it has rows."""
        lo, hi, left = source
        for half in range(2):
            # Rows of one matrix are a constant apart: one address in registers.
            near = half and self.groups == 1
            words = ptx.load_global_128_if(
                hi if half and not near else lo,
                Int32(left > 8 * half),
                64 * chunk + (16 * self.t.k if near else 0),
                [weights[i, half, slot] for i in range(4)] if old else (),
                STREAM,
            )
            for i in range(4):
                weights[i, half, slot] = words[i]

    @cute.jit
    def copy_tokens(self, x, m):
        """Lane 4 t + q copies bytes 16 q .. of 32 columns of token t of a tile at a
        time. The four warps share tiles and columns."""
        t = self.t
        place = self.place()
        warp = self.copier()
        words = cute.make_rmem_tensor((4, t.token_loads), Int32)
        words.fill(0)
        # A warp's tiles, their columns of a part apart.
        tiles = max(1, t.token_tiles // WARPS)
        sharers = WARPS * tiles // t.token_tiles
        tile, chunk = warp % t.token_tiles, warp // t.token_tiles
        column = place.rank * t.local_k + place.lane % 4 * 8 + chunk * 32
        sources, left = [], []
        for i in cutlass.range_constexpr(tiles):
            token = (tile + i * WARPS) * 8 + place.lane // 4
            row = x.iterator.toint() + Int64(token) * (x.stride[0] * 2)
            sources.append(row + Int64(column * 2))
            # Steps that this lane still has to load; none of a token past M, whose
            # words stay zero.
            left.append(cutlass.select_(token < m, t.local_chunks - chunk, Int32(0)))
        target = self.tokens() + tile * t.tile_pitch + chunk * CHUNK_BYTES
        target = target + 4 * place.lane
        for i in cutlass.range_constexpr(t.token_loads):
            self.load_tokens(words, i, sources, left, tiles, sharers, 0)
        for part in cutlass.range(t.parts, unroll=1):
            begin = part * t.part_chunks
            for i in cutlass.range_constexpr(t.token_loads):
                step = i // tiles * sharers
                there = begin + step < t.local_chunks - chunk
                wgmma.store_tokens(
                    target
                    + begin * CHUNK_BYTES
                    + (i % tiles * WARPS * t.tile_pitch + step * CHUNK_BYTES),
                    Int32(there),
                    [words[j, i] for j in range(4)],
                )
                self.load_tokens(
                    words, i, sources, left, tiles, sharers, begin + t.part_chunks
                )
            wgmma.fence_stores()
            cute.arch.mbarrier_arrive(self.barrier(self.x_full(part)))

    def load_tokens(self, words, i, sources, left, tiles, sharers, begin):
        step = i // tiles * sharers
        found = ptx.load_global_128_if(
            sources[i % tiles] + Int64(begin) * 64,
            Int32(begin + step < left[i % tiles]),
            64 * step,
            [words[j, i] for j in range(4)],
        )
        for j in range(4):
            words[j, i] = found[j]

    @cute.jit
    def multiply(self, weights, source: list, ws, ys, division, m):
        """All turns of a warp, slice by slice."""
        t = self.t
        place = self.place()
        lo, hi, left = source
        total = cute.make_rmem_tensor((4, t.token_tiles), Float32)
        waiting = cute.make_rmem_tensor((4, t.token_tiles, max(t.levels, 1)), Float32)
        last = t.unit_slices - 1
        zero = m >> 16
        for unit in cutlass.range(division[2] * t.unit_slices, unroll=1):
            turn = unit >> t.levels
            number = unit & last
            size = 64 * t.slice_chunks
            after = lo + size, hi + size, left
            if number == last:
                # Looks new in each turn: what is kept of it costs registers.
                here = place._replace(lane=place.lane | (unit & zero))
                after = self.locate(ws, here, turn + 1, division)
            begin = (place.group * t.unit_slices + number) * t.slice_chunks
            self.slice(weights, total, (lo, hi, left), after, begin, zero, unit)
            self.fold(total, waiting, number)
            if number == last:
                self.deliver(ws, ys, total, turn, division, m)
            lo, hi, left = after

    def slice(self, weights, total, source, after, begin, zero, unit):
        """Sums of a slice, whose first step of the CTA's columns is ``begin``; asks for
        the weights ``depth`` steps ahead."""
        t = self.t
        lane = self.place().lane
        # x + -0.0 is x, bit by bit.
        total.fill(-0.0)
        sums = [Float32(0.0)] * (4 * t.token_tiles)
        address = self.tokens() + begin * CHUNK_BYTES
        for first in range(0, t.slice_chunks, t.chunks):
            end = begin + (first + t.chunks - 1)
            self.wait(self.x_full(Int32(Uint32(end) // t.part_chunks)), 0)
            words = []
            for i in range(first, first + t.chunks):
                low, high = (
                    [weights[j, half, i % t.depth] for j in range(4)]
                    for half in range(2)
                )
                for h in (0, 2):
                    words += [low[h], high[h], low[h + 1], high[h + 1]]
            sums = wgmma.multiply(
                words,
                zero,
                address + first * CHUNK_BYTES,
                lane,
                sums,
                [total[i, n] for n in range(t.token_tiles) for i in range(4)],
                t.tile_pitch,
            )
            for n in range(t.token_tiles):
                for i in range(4):
                    total[i, n] = total[i, n] + sums[4 * n + i]
            for i in range(first, first + t.chunks):
                ahead = i + t.depth
                if ahead < t.slice_chunks:
                    self.load(weights, i % t.depth, source, ahead, old=True)
                else:
                    ahead -= t.slice_chunks
                    self.load(weights, i % t.depth, after, ahead, old=True)

    @cute.jit
    def fold(self, total, waiting, number):
        """The balanced tree over slices: as binary counting carries, ``number`` being
        the slices before this one."""
        t = self.t
        for level in cutlass.range_constexpr(t.levels):
            below = (1 << level) - 1
            if number & below == below:
                if number & (1 << level):
                    for n in cutlass.range_constexpr(t.token_tiles):
                        for i in cutlass.range_constexpr(4):
                            total[i, n] = waiting[i, n, level] + total[i, n]
                else:
                    for n in cutlass.range_constexpr(t.token_tiles):
                        for i in cutlass.range_constexpr(4):
                            waiting[i, n, level] = total[i, n]

    @cute.jit
    def deliver(self, ws, ys, total, turn, division, m):
        """The warp's sums, to the finishing warps; one that has all of K stores."""
        t = self.t
        place = self.place()
        if const_expr(t.contributors == 1):
            for n in cutlass.range_constexpr(t.token_tiles):
                sums = [total[i, n] for i in range(4)]
                self.store(ws, ys, sums, n, place, turn, division, m)
        else:
            # The last turn's sums have been read, or this is the first.
            self.wait(self.sums_free(place.block), turn & 1 ^ 1)
            sender = (place.rank * t.k_groups + place.group) * TILE_BYTES
            full = self.sums_full(place.block)
            for n in cutlass.range_constexpr(t.token_tiles):
                if n * 8 < m:
                    sums = [total[i, n] for i in range(4)]
                    target = self.sums(place, n % t.own_tiles) + sender
                    if const_expr(t.cluster > 1):
                        receiver = Int32(n // t.own_tiles)
                        ptx.store_remote_f32x4(target, sums, full, receiver)
                    else:
                        self.leave(target, sums)
            if const_expr(t.cluster == 1):
                cute.arch.mbarrier_arrive(self.barrier(full))

    @cute.jit
    def leave(self, at, v: list):
        place = cute.make_tensor(
            cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=16),
            cute.make_layout((4,)),
        )
        for i in cutlass.range_constexpr(4):
            place[i] = v[i]

    @cute.jit
    def finish(self, ws, ys, division, m):
        """All turns' sums."""
        own = self.own(self.place(), m)
        if own > 0:
            for turn in cutlass.range(division[2], unroll=1):
                self.finish_turn(ws, ys, own, turn, division, m)

    @cute.jit
    def finish_turn(self, ws, ys, own, turn, division, m):
        """Adds everybody's sums of this CTA's tiles, of every fourth block a warp, and
        stores them."""
        t = self.t
        for i in cutlass.range_constexpr(0, t.row_blocks, WARPS):
            place = self.place()._replace(block=i + self.copier())
            self.wait(self.sums_full(place.block), turn & 1)
            # Nobody waits for the last turn's sums to be read.
            again = turn + 1 < division[2]
            if const_expr(t.cluster > 1):  # noqa: SIM102
                if again:
                    with cute.arch.elect_one():
                        self.expect_sums(place.block, own)
                    cute.arch.sync_warp()
            totals = []
            for tile in cutlass.range_constexpr(t.own_tiles):
                at = self.sums(place, tile)
                parts = [
                    ptx.load_shared_f32x4(at, c * TILE_BYTES)
                    for c in range(t.contributors)
                ]
                totals.append(add_tree(parts))
            if again:
                self.give_back(totals, place, m)
            for tile in cutlass.range_constexpr(t.own_tiles):
                n = place.rank * t.own_tiles + tile
                self.store(ws, ys, totals[tile], n, place, turn, division, m)

    @cute.jit
    def give_back(self, totals: list, place, m):
        """A block's sums have been read, by all lanes: the vote needs each one's
        data."""
        bits = ptx.float_bits(totals[0][3])
        for v in totals[1:]:
            bits = bits | ptx.float_bits(v[3])
        done = Int32(cute.arch.vote_any_sync(bits != 0))
        zero = m >> 16
        free = self.sums_free(place.block)
        if const_expr(self.t.cluster > 1):
            if place.lane < self.t.cluster:
                ptx.arrive_remote_after(free, place.lane, done, zero)
        else:
            if place.lane == 0:
                ptx.arrive_after(free, done, zero)

    @cute.jit
    def store(self, ws, ys, v, tile, place, turn, division, m):
        """A lane's four sums: rows g and g + 8 of the block, tokens 2 q and 2 q + 1."""
        start, end = self.bounds(place, turn, division)
        for half in cutlass.range_constexpr(2):
            row = start + place.lane // 4 + 8 * half
            for i in cutlass.range_constexpr(2):
                token = tile * 8 + place.lane % 4 * 2 + i
                if (row < end) & (token < m):
                    store(ys, ws, self.out_dtypes, token, row, v[2 * half + i])
