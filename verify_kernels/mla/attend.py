# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's rows over a paged latent cache, split over keys.

    s_rj = <query_r, line_j> scale,  v_j = line_j[:512],  j < the keys that row r sees
    m_r = max_j s_rj,  l_r = sum_j e^(s_rj - m_r),  o_r = sum_j e^(s_rj - m_r) v_j

for every (row, head) pair r and each of its splits (`verify_kernels.mla.plan`), kept as
o_r, m_r log2 e and l_r; `verify_kernels.mla.merge` adds the splits.

A CTA walks along blocks of 64 keys with a tile of 64 pairs of one request, whose query
rows stay in shared memory; a block's lines are read once for all of them, as keys and
as values. Two warpgroups have all scores of a block each, by wgmma (products.py), turn
them into weights e^(s - m), rounded to bf16, and multiply with these 256 latent columns
each. So nothing crosses over between them.

While a block is multiplied the next one is copied (cp.async, 16 bytes, one line's page
looked up for each), beyond the end of a split and of a request too.

A pair's sums begin anew at a split and run over its blocks in order, in fp32; keys that
it does not see add exact zeros. So its bits depend on its own query and keys alone, as
long as the lines behind them, of later rows of its request, are finite: 0 times NaN is
NaN here. Lines behind a request's last key are zeros in shared memory, whatever the
cache has there.

Read once: the cache lines of a tile. Early loads: none.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.common import ptx
from verify_kernels.common.wgmma import fence_stores
from verify_kernels.mla import plan, products
from verify_kernels.mla.parts import LATENT, LINE

GROUPS = 2
THREADS = 128 * GROUPS
LOG2_E = 1.4426950408889634
_LINE_BYTES = 2 * LINE
_TILE_BYTES = products.PANELS * products.PANEL_BYTES
_STAGES = 2
_KEYS_AT = _TILE_BYTES
_PLAN_AT = _KEYS_AT + _STAGES * _TILE_BYTES
#: Lanes that copy a row of a panel, 16 bytes each.
_COPIERS = products.ROW_BYTES // 16
#: Rows that are copied at a time.
_AT_ONCE = THREADS // _COPIERS


class AttendKernel:
    """For any number of heads, requests and pages, and any page."""

    pdl = True
    parameters = (
        "query",
        "cache",
        "block_table",
        "row_start",
        "history",
        "slots",
        "sums",
        "scales",
    )
    early_loads = ()
    early_release = "dependents wait before they read what this kernel stores"
    shared_bytes = _PLAN_AT + plan.PLAN_BYTES

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,  # bf16 [M, H, 576]
        cache: cute.Tensor,  # bf16 [pages, page, 576], pages any distance apart
        block_table: cute.Tensor,  # int32 [B, pages of a request]
        row_start: cute.Tensor,  # int32 [B + 1]
        history: cute.Tensor,  # int32 [B]
        slots: cute.Tensor,  # int32 [B]
        sums: cute.Tensor,  # fp32 [M' H, S, 512]
        scales: cute.Tensor,  # fp32 [M' H, S, 2]
        scale: Float32,
        most: Int32,
        causal: Int32,
        counted: Int32,
        ctas: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            query,
            cache,
            block_table,
            row_start,
            history,
            slots,
            sums,
            scales,
            scale * LOG2_E,
            most,
            causal,
            counted,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        query: cute.Tensor,
        cache: cute.Tensor,
        block_table: cute.Tensor,
        row_start: cute.Tensor,
        history: cute.Tensor,
        slots: cute.Tensor,
        sums: cute.Tensor,
        scales: cute.Tensor,
        scale: Float32,
        most: Int32,
        causal: Int32,
        counted: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        lane = cute.arch.lane_idx()
        heads = query.shape[1]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        at = base + _PLAN_AT
        if thread < 32:
            plan.make(at, lane, row_start, history, slots, heads, most, causal, counted)
        cute.arch.sync_threads()
        begin, end = plan.share(at, lane, cta, ctas)
        if begin < end:
            self.walk(
                query,
                cache,
                block_table,
                sums,
                scales,
                base,
                thread,
                begin,
                end,
                scale,
                most,
                causal,
            )

    @cute.jit
    def walk(
        self,
        query: cute.Tensor,
        cache: cute.Tensor,
        block_table: cute.Tensor,
        sums: cute.Tensor,
        scales: cute.Tensor,
        base,
        thread,
        begin,
        end,
        scale,
        most,
        causal,
    ):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp >> 2
        g, q = lane >> 2, lane & 3
        heads = query.shape[1]
        at = base + _PLAN_AT
        #: Of a warpgroup's tile, this lane's first row; the other is eight further.
        own = (warp & 3) * 16 + g
        keys_at = base + _KEYS_AT
        columns = keys_at + group * (4 * products.PANEL_BYTES)

        index, tile, block, blocks, bits = plan.find(at, begin, lane)
        # The table's numbers are under way while the query is asked for.
        pages = self.pages(cache, block_table, at, thread, index, block)
        products.copy(self.query_copies(query, at, base, thread, index, tile))
        products.copy(
            self.keys_copies(cache, at, keys_at, thread, index, block, pages, Int32(1))
        )
        seen = self.visible(at, index, tile, own, heads, causal)
        follow = self.follow(at, lane, begin + 1, index, tile, block, blocks, bits)
        next_index, next_tile, next_block, next_blocks, next_bits = follow
        pages = self.pages(cache, block_table, at, thread, next_index, next_block)
        sum_o = cute.make_rmem_tensor((products.COLUMNS // 2,), Float32)
        sum_o.fill(0.0)
        top = [Float32(-Float32.inf)] * 2
        total = [Float32(0.0)] * 2

        for place in cutlass.range(begin, end, unroll=1):
            stage = ((place - begin) & 1) * _TILE_BYTES
            ptx.wait_copies(0)
            fence_stores()
            # Nobody reads what the block before was in any more, nor its query.
            cute.arch.sync_threads()
            fresh = (block == 0) & (place > begin)
            if fresh:
                products.copy(self.query_copies(query, at, base, thread, index, tile))
                ptx.wait_copies(0)
                fence_stores()
                cute.arch.sync_threads()
                seen = self.visible(at, index, tile, own, heads, causal)
            copies = self.keys_copies(
                cache,
                at,
                keys_at + (_TILE_BYTES - stage),
                thread,
                next_index,
                next_block,
                pages,
                Int32(place + 1 < end),
            )
            s = products.scores(base, keys_at + stage, copies, warp & 3, lane)
            first = block * plan.BLOCK + 2 * q
            highest = [Float32(-Float32.inf)] * 2
            for n in cutlass.range_constexpr(len(s)):
                half = n // 2 % 2
                key = first + n // 4 * 8 + n % 2
                s[n] = cutlass.select_(key < seen[half], s[n], Float32(-Float32.inf))
                highest[half] = cute.arch.fmax(highest[half], s[n])
            shrink = []
            for half in cutlass.range_constexpr(2):
                new = highest[half]
                for offset in (1, 2):
                    other = cute.arch.shuffle_sync_bfly(new, offset=offset)
                    new = cute.arch.fmax(new, other)
                new = cute.arch.fmax(top[half], new)
                shrink.append(cute.math.exp2((top[half] - new) * scale, fastmath=True))
                top[half] = new
                total[half] = total[half] * shrink[half]
            weights = []
            for n in cutlass.range_constexpr(0, len(s), 2):
                half = n // 2 % 2
                pair = []
                for i in cutlass.range_constexpr(2):
                    shifted = cute.math.fma(s[n + i], scale, -top[half] * scale)
                    pair.append(cute.math.exp2(shifted, fastmath=True))
                    total[half] = total[half] + pair[i]
                weights.append(ptx.pack_bf16x2(*pair))
            follow = self.follow(
                at,
                lane,
                place + 2,
                next_index,
                next_tile,
                next_block,
                next_blocks,
                next_bits,
            )
            pages = self.pages(cache, block_table, at, thread, follow[0], follow[2])
            rest = (Int32(1) << (bits - plan.BLOCK_BITS)) - 1
            within = Int32((block & rest) > 0)
            self.add_values(sum_o, weights, columns + stage, shrink, within, lane)
            if ((next_block & rest) == 0) | (place + 1 == end):
                split = block >> (bits - plan.BLOCK_BITS)
                self.leave(
                    sums,
                    scales,
                    base,
                    at,
                    index,
                    tile,
                    split,
                    own,
                    group,
                    q,
                    heads,
                    most,
                    scale,
                    sum_o,
                    top,
                    total,
                )
                top = [Float32(-Float32.inf)] * 2
                total = [Float32(0.0)] * 2
            index, tile, block, bits = next_index, next_tile, next_block, next_bits
            next_index, next_tile, next_block, next_blocks, next_bits = follow

    def add_values(self, sum_o, weights, keys, factors, adds, lane):
        count = products.COLUMNS // 2
        old = [sum_o[n] for n in range(count)]
        new = products.values(weights, keys, old, factors, adds, lane)
        for n in range(count):
            sum_o[n] = new[n]

    @cute.jit
    def follow(self, at, lane, place, index, tile, block, blocks, bits):
        """The block behind one, which is at ``place``; behind the last one any."""
        block = block + 1
        if block == blocks:
            index, tile, block, blocks, bits = plan.find(at, place, lane)
        return index, tile, block, blocks, bits

    def visible(self, at, index, tile, own, heads, causal):
        """Keys that this lane's two pairs see; 0 where there is none."""
        entry = plan.Entry(at, index)
        _, pairs = entry.pairs(heads)
        seen = []
        for half in range(2):
            pair = tile * plan.TILE + own + 8 * half
            unseen = entry.end - 1 - entry.first - plan.quotient(pair, heads)
            unseen = cutlass.select_(causal != 0, unseen, Int32(0))
            seen.append(cutlass.select_(pair < pairs, entry.keys - unseen, Int32(0)))
        return seen

    def pages(self, cache, block_table, at, thread, index, block):
        """Where the lines are that this lane copies of a block: pages, of the cache's
        all, and lines in them."""
        entry = plan.Entry(at, index)
        # Behind the end it is nobody's.
        request = cutlass.min(entry.request, block_table.shape[0] - 1)
        page = cache.shape[1]
        found = []
        for first in range(0, plan.BLOCK, _AT_ONCE):
            key = block * plan.BLOCK + first + thread // _COPIERS
            key = cutlass.min(key, cutlass.max(entry.keys - 1, Int32(0)))
            number = plan.quotient(key, page)
            found.append(block_table[request, number])
            found.append(key - number * page)
        return found

    def keys_copies(self, cache, at, to, thread, index, block, pages, live):
        """This lane's part of a block's lines, zeros behind the last."""
        keys = plan.Entry(at, index).keys
        row = thread // _COPIERS
        sources, sizes = [], []
        for i, first in enumerate(range(0, plan.BLOCK, _AT_ONCE)):
            source = cache.iterator.toint() + Int64(pages[2 * i]) * (
                cache.stride[0] * 2
            )
            sources.append(source + pages[2 * i + 1] * _LINE_BYTES)
            sizes.append(self.size(block * plan.BLOCK + first + row < keys))
        return self.copies(to, thread, sources, sizes, live)

    def query_copies(self, query, at, to, thread, index, tile):
        """This lane's part of a tile's query rows, zeros behind the last."""
        begin, pairs = plan.Entry(at, index).pairs(query.shape[1])
        sources, sizes = [], []
        for first in range(0, plan.TILE, _AT_ONCE):
            pair = tile * plan.TILE + first + thread // _COPIERS
            there = pair < pairs
            pair = begin + cutlass.select_(there, pair, Int32(0))
            sources.append(query.iterator.toint() + Int64(pair) * _LINE_BYTES)
            sizes.append(self.size(there))
        return self.copies(to, thread, sources, sizes, Int32(1))

    def size(self, there):
        return cutlass.select_(there, Int32(16), Int32(0))

    def copies(self, to, thread, sources, sizes, live):
        """Of 16 bytes of two rows, as `products.scores` takes them."""
        row, chunk = thread // _COPIERS, thread % _COPIERS
        place = to + row * products.ROW_BYTES + (chunk ^ (row & 7)) * 16
        return live, place, [s + Int64(chunk * 16) for s in sources], sizes

    @cute.jit
    def leave(
        self,
        sums: cute.Tensor,
        scales: cute.Tensor,
        base,
        at,
        index,
        tile,
        split,
        own,
        group,
        q,
        heads,
        most,
        scale,
        sum_o: cute.Tensor,
        top,
        total,
    ):
        """Stores what a split has come to."""
        for half in cutlass.range_constexpr(2):
            for offset in (1, 2):
                total[half] = total[half] + cute.arch.shuffle_sync_bfly(
                    total[half], offset=offset
                )
        begin, pairs = plan.Entry(at, index).pairs(heads)
        for half in cutlass.range_constexpr(2):
            pair = tile * plan.TILE + own + 8 * half
            place = (Int64(begin + pair) << Int64(most)) + split
            to = sums.iterator.toint() + place * (4 * LATENT)
            to = to + (group * products.COLUMNS + 2 * q) * 4
            if pair < pairs:
                for n in cutlass.range_constexpr(products.COLUMNS // 8):
                    words = [
                        ptx.float_bits(sum_o[4 * n + 2 * half + i]) for i in range(2)
                    ]
                    ptx.store_global_64(to + 32 * n, words)
                if (q == 0) & (group == 0):
                    found = (top[half] * scale, total[half])
                    ptx.store_global_64(
                        scales.iterator.toint() + place * 8,
                        [ptx.float_bits(v) for v in found],
                    )
