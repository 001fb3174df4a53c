# SPDX-License-Identifier: Apache-2.0
"""The wide kernel with asynchronous copies: weights and X on their way need no
registers.

As `wide`, but for two things. Loads to registers say that they have come by one of six
scoreboards, which ptxas shares among them: a warp that waits for its oldest weights
waits for those that it has just asked for too (SASS of `wide`: seven loads of eight on
one scoreboard, which the next segment waits for), so a segment takes the memory's
whole latency however deep the pipeline is. Copies of a lane are counted in order.

    weights   each lane copies the 16 bytes of its fragments to a place of its own,
              ``depth`` steps of 32 columns ahead, waits for the oldest group and loads
              them from there: no barrier, no bank conflict. It asks anew once products
              have been made of what it had
    X         the warps of their own copy it as it is, 16 bytes a lane, everything at
              once; as parts come, each warp brings its tiles of 8 tokens by 32 columns
              into the tensor cores' order, in place

With ``stages`` only so many parts of X have room. Each turn copies X anew: a warpgroup
gives a part back when its products have been made, and the copying warps bring the part
after next into order while one is multiplied. They finish the sums of a turn while the
next one is under way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from verify_kernels.common import ptx, wgmma
from verify_kernels.skinny_gemm.wide import WideGemmKernel
from verify_kernels.skinny_gemm.wide_tiling import (
    CHUNK_BYTES,
    LAG,
    WARPS,
    WideTiling,
)

#: Bytes of a warp's weights of 32 columns: two halves of eight rows.
STEP_BYTES = 2 * CHUNK_BYTES
#: Tiles by 32 columns of X in a warp's registers while it brings them into order.
TOGETHER = 8


class StagedWideGemmKernel(WideGemmKernel):
    """One staged tiling, output types and number of weight matrices, for any N, M."""

    def __init__(self, tiling: WideTiling, out_dtypes):
        super().__init__(tiling, out_dtypes)
        # X is written twice, and with stages again and again.
        self.kept_shared = ()

    # Shared memory: as in `wide`, then the weights under way.

    def x_barriers(self):
        return 2 * self.t.stages or self.t.parts

    def x_free(self, stage):
        return self.base() + 8 * (self.t.stages + stage)

    @cute.jit
    def make_x_barriers(self, warp):
        t = self.t
        count = t.stages or t.parts
        for i in cutlass.range_constexpr(0, count, WARPS):
            if i + warp < count:
                self.init(self.x_full(i + warp), 32 * WARPS)
                if const_expr(t.stages):
                    self.init(self.x_free(i + warp), WARPS * t.multipliers)

    def queue(self):
        """This lane's place in its warp's queue."""
        t = self.t
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        start = self.base() + (t.shared_bytes - t.queue_bytes)
        return start + warp * (t.depth * STEP_BYTES) + 16 * cute.arch.lane_idx()

    # Weights.

    def hold(self):
        return None

    def request(self, weights, source):
        queue = self.queue()
        for i in range(self.t.depth):
            self.ask(queue + i * STEP_BYTES, source, i)

    def ask(self, place, source, chunk):
        """Asks for 32 columns of a block, where it has rows; one group of copies."""
        lo, hi, left = source
        for half in range(2):
            near = half and self.groups == 1
            ptx.copy_async_128_if(
                place,
                hi if half and not near else lo,
                Int32(left > 8 * half),
                CHUNK_BYTES * half,
                64 * chunk + (16 * self.t.k if near else 0),
                ".L2::256B",
            )
        ptx.commit_copies()

    def slice(self, weights, total, source, after, begin, zero, unit):
        """As in `wide`; ``unit`` slices have gone through the queue before."""
        t = self.t
        lane = self.place().lane
        total.fill(-0.0)
        queue = self.queue()
        end = queue + t.depth * STEP_BYTES
        at = queue + Int32(Uint32(unit * t.slice_chunks) % t.depth * STEP_BYTES)
        parts = t.slice_chunks // t.part_chunks
        stage, phase = Int32(0), Int32(0)
        if t.stages:
            number = Uint32(unit * parts)
            stage = Int32(number % t.stages)
            phase = Int32(number // t.stages) & 1
        sums = [cutlass.Float32(0.0)] * (4 * t.token_tiles)
        for first, last in t.pieces():
            if t.stages:
                if first % t.part_chunks == 0:
                    self.wait(self.x_full(stage), phase)
                place = stage * (t.token_tiles * t.tile_pitch)
                place = place + first % t.part_chunks * CHUNK_BYTES
            else:
                if first % t.chunks == 0:
                    ready = Uint32(begin + first + t.chunks - 1) // t.part_chunks
                    self.wait(self.x_full(Int32(ready)), 0)
                place = (begin + first) * CHUNK_BYTES
            ptx.wait_copies(t.depth - (last - first))
            words, places = [], []
            for _ in range(first, last):
                low, high = (
                    ptx.load_shared_128(at, CHUNK_BYTES * half) for half in range(2)
                )
                for h in (0, 2):
                    words += [low[h], high[h], low[h + 1], high[h + 1]]
                places.append(at)
                at = at + STEP_BYTES
                at = cutlass.select_(at == end, queue, at)
            sums = wgmma.multiply(
                words,
                zero,
                self.tokens() + place,
                lane,
                sums,
                [total[i, n] for n in range(t.token_tiles) for i in range(4)],
                t.tile_pitch,
                first % t.chunks == 0,
            )
            # A sum needs all the words: their place is free when it is there.
            done = ptx.float_bits(sums[0])
            for i, free in zip(range(first, last), places, strict=True):
                free = free + (done & zero)
                ahead = i + t.depth
                if ahead < t.slice_chunks:
                    self.ask(free, source, ahead)
                else:
                    self.ask(free, after, ahead - t.slice_chunks)
            if t.stages and last % t.part_chunks == 0:
                self.free_part(stage, sums, zero)
                stage = stage + 1
                phase = cutlass.select_(stage == t.stages, phase ^ 1, phase)
                stage = cutlass.select_(stage == t.stages, Int32(0), stage)
            if last % t.chunks == 0:
                for n in range(t.token_tiles):
                    for i in range(4):
                        total[i, n] = total[i, n] + sums[4 * n + i]

    @cute.jit
    def free_part(self, stage, sums, zero):
        """A warp's products of a part have been made: a sum needs all lanes' loads of
        its tile, and with wgmma, which is waited for, everything."""
        done = ptx.float_bits(sums[0])
        if const_expr(not wgmma.has_wgmma()):
            for value in sums[4::4]:
                done = done | ptx.float_bits(value)
        with cute.arch.elect_one():
            ptx.arrive_after(self.x_free(stage), done, zero)

    # X.

    @cute.jit
    def serve(self, x, ws, ys, division, m):
        t = self.t
        turns = division[2] if t.stages else Int32(1)
        total = turns * t.parts
        lead = t.stages - LAG if t.stages else t.parts
        for part in cutlass.range(lead, unroll=1):
            self.copy_part(x, m, part, part, total)
        at, turn = Int32(0), Int32(0)
        own = self.own(self.place(), m)
        for number in cutlass.range(total, unroll=1):
            if const_expr(t.stages):
                coming = number + lead
                stage = Int32(Uint32(coming) % t.stages)
                before = Int32(Uint32(coming) // t.stages)
                self.wait(self.x_free(stage), before & 1 ^ 1)
                self.copy_part(
                    x, m, Int32(Uint32(coming) % t.parts), stage, total - coming
                )
            else:
                ptx.commit_copies()
            ptx.wait_copies(lead)
            stage = Int32(Uint32(number) % t.stages) if t.stages else number
            if const_expr(not t.stages):
                # The audit wants a wait between an arrival and further loads: for the
                # part before, at which all copying warps have arrived.
                before = cutlass.max(number - 1, 0)
                self.wait(self.x_full(before), Int32(number == 0))
            self.arrange(stage, m >> 16)
            if const_expr(t.stages and t.contributors > 1):
                # The sums of the turn before came while this one's first parts did.
                if (at == min(t.parts - 1, 2 * t.stages)) & (turn > 0) & (own > 0):
                    self.finish_turn(ws, ys, own, turn - 1, division, m)
                at = at + 1
                if at == t.parts:
                    at, turn = Int32(0), turn + 1
        if const_expr(t.contributors > 1):
            if const_expr(t.stages):
                if own > 0:
                    self.finish_turn(ws, ys, own, turns - 1, division, m)
            else:
                self.finish(ws, ys, division, m)

    def share(self):
        """A copying warp's tiles of a part, the warps that share a tile's columns, and
        its first tile and column of 32 among them."""
        t = self.t
        warp = self.copier()
        tiles = max(1, t.token_tiles // WARPS)
        sharers = WARPS * tiles // t.token_tiles
        return tiles, sharers, warp % t.token_tiles, warp // t.token_tiles

    def steps(self):
        """Of each of a warp's tiles by 32 columns of a part: its place among tiles, and
        its step beside the warp's first."""
        tiles, sharers, _, _ = self.share()
        for i in range(self.t.token_loads):
            yield i % tiles, i // tiles * sharers

    def part_place(self, stage):
        """Where a warp's first tile of a part is."""
        t = self.t
        _, _, tile, chunk = self.share()
        first = chunk if t.stages else chunk + stage * t.part_chunks
        place = self.tokens() + tile * t.tile_pitch + first * CHUNK_BYTES
        if t.stages:
            place = place + stage * (t.token_tiles * t.tile_pitch)
        return place

    def copy_part(self, x, m, part, stage, left):
        """Asks for a part of X, one group of copies; without any if ``left`` is not
        above 0. Lane 4 t + q copies bytes 16 q .. of 32 columns of token t."""
        t = self.t
        lane = self.place().lane
        tiles, _, tile, chunk = self.share()
        place = self.part_place(stage) + 16 * lane
        chunk = chunk + part * t.part_chunks
        column = self.place().rank * t.local_k + lane % 4 * 8 + chunk * 32
        sources, sizes = [], []
        for i in range(tiles):
            token = (tile + i * WARPS) * 8 + lane // 4
            sizes.append(cutlass.select_(token < m, Int32(16), Int32(0)))
            token = cutlass.select_(token < m, token, Int32(0))
            row = x.iterator.toint() + Int64(token) * (x.stride[0] * 2)
            sources.append(row + Int64(column * 2))
        within = cutlass.select_(left > 0, t.local_chunks - chunk, Int32(0))
        for i, step in self.steps():
            ptx.copy_async_128_if(
                place,
                sources[i],
                Int32(step < within),
                i * WARPS * t.tile_pitch + step * CHUNK_BYTES,
                64 * step,
                size=sizes[i],
            )
        ptx.commit_copies()

    def arrange(self, stage, zero):
        """Brings a part that has come into the tensor cores' order, and tells. The vote
        needs what every lane has loaded, and each store's place the vote."""
        t = self.t
        lane = self.place().lane
        raw = self.part_place(stage)
        steps = list(self.steps())
        for begin in range(0, len(steps), TOGETHER):
            found, tie = [], Int32(0)
            for i, step in steps[begin : begin + TOGETHER]:
                at = i * WARPS * t.tile_pitch + step * CHUNK_BYTES
                words = ptx.load_shared_128(raw + 16 * lane, at)
                found.append((at, words))
                tie = tie | words[3]
            tie = Int32(cute.arch.vote_any_sync(tie != 0)) & zero
            cute.arch.sync_warp()
            for at, words in found:
                wgmma.store_tokens(raw + 4 * lane + tie + at, Int32(1), words)
        wgmma.fence_stores()
        cute.arch.mbarrier_arrive(self.barrier(self.x_full(stage)))
