# SPDX-License-Identifier: Apache-2.0
"""Y_g[M, N_g] = X[M, K] W_g[N_g, K]^T where a launch must be short: no ring, no roles.

The rows of all W_g count as one list. A CTA owns an equal run of it, 8 or 16 rows at
most, and all of K. Its warps share the segments of K (tiling.py), each a run of them:

    load        16 bytes a lane and row straight into fragments, `depth` segments ahead;
                where that is all of the warp's, every weight is requested at once
    multiply    a segment is one chain of m16n8k16, weights the 16-row operand, tokens
                the 8 columns, as in kernel.py; of one half the other rows are zero
    leave       the segment's sums in shared memory; a warp that has whole slices first
                adds their segments in order, then the slices in the balanced tree
    add         after one barrier all threads: a lane a leaf of the tree, token and row;
                it adds the leaf's segments in order, shuffles add the leaves (a + b is
                b + a), and the first lane stores

One warp with all of K stores straight from its registers, without a barrier.

Lanes whose row is past the run, or whose token is past M, load nothing: of a run of one
row a warp's load moves 64 bytes instead of 512. What their registers hold instead
enters only rows and columns of the products that are never stored, and no row or column
depends on another.

Read once: every weight. Read by each CTA: X, straight into registers or through the
shared memory of the warp that needs it (`staged`). Early loads: the weights that are in
flight first. Dependents are released at entry: they wait before they read. The host
part divides the rows, so no lane divides before its first load.
"""

import functools
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr

from verify_kernels.common import ptx
from verify_kernels.skinny_gemm.device import STREAM, GemmKernel, add, locate
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling


class DirectGemmKernel(GemmKernel):
    """One tiling, output types and number of weight matrices, for any N and M.

    The grid must have so many CTAs that none gets more than ``tiling.rows`` rows.
    """

    t: DirectTiling

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [M, K], rows any multiple of 16 bytes apart
        ws: list,  # [N_g, K]
        ys: list,  # [M, N_g], rows any distance apart
        ctas: Int32,
        pdl: Int32,
        stream,
    ):
        rows = Int32(0)
        for g in cutlass.range_constexpr(self.groups):
            rows = rows + ws[g].shape[0]
        run = Int32(Uint32(rows) // Uint32(ctas))
        self.kernel(x, ws, ys, run, rows - run * ctas).launch(
            grid=[ctas, 1, 1],
            block=[self.t.threads, 1, 1],
            smem=self.t.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=self.t.ctas_per_sm,
            # As the kernels around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, ws: list, ys: list, run: Int32, longer: Int32):
        t = self.t
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = block * run + cutlass.min(block, longer)
        height = run + Int32(block < longer)
        warp = thread >> 5
        g = thread >> 2 & 7
        q = thread & 3
        column = warp * (t.steps * 64) + q * 16
        w_at = [
            (
                locate(ws, first + g + 8 * h, t.k) + Int64(column),
                Int32(g + 8 * h < height),
            )
            for h in range(t.halves)
        ]
        depth = t.depth * t.chunks
        load = functools.partial(ptx.load_global_128_if, hint=STREAM)
        weight_words = functools.partial(self.fetch, load, w_at)
        weights = [weight_words(i) for i in range(depth)]
        cute.arch.griddepcontrol_wait()
        m = x.shape[0]
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        if const_expr(t.staged):
            places = self.stage(x, base, thread, warp, g, q, m)
            load = ptx.load_shared_128_if
        else:
            places = [
                (self.token(x, 8 * n + g) + Int64(column), Int32(8 * n + g < m))
                for n in range(t.token_tiles)
            ]
            load = ptx.load_global_128_if
        token_words = functools.partial(self.fetch, load, places)
        parts = self.multiply(weights, weight_words, token_words)
        if const_expr(t.in_registers):
            self.store_own(ys, ws, parts[0], g, q, first, height, m)
        else:
            base = base + t.staged_bytes
            # Token 2q, row g of this warp's first partial sum.
            at = warp * (t.warp_parts * t.part_pitch) + 2 * q * t.token_pitch + g
            self.leave(parts, base + 4 * at)
            self.add_parts(ys, ws, base, thread, warp, first, height, m)

    def fetch(self, load, places, step, old=()):
        """32 columns of each row that there is: four words a lane."""
        return [
            load(at, live, 64 * step, o)
            for (at, live), o in itertools.zip_longest(places, old, fillvalue=())
        ]

    def token(self, x, token):
        """Address of a row of X."""
        return x.iterator.toint() + Int64(token) * (x.stride[0] * 2)

    def stage(self, x, base, thread, warp, g, q, m):
        """Copies this warp's columns of the tokens to shared memory, and says where.

        A lane copies 16 bytes at a time, of the tokens that there are.
        """
        t = self.t
        lane = thread & 31
        area = base + warp * (t.staged * t.staged_pitch)
        source = Int64(warp * (64 * t.steps) + 16 * lane)
        copies = [
            (token, first)
            for token in range(t.staged)
            for first in range(0, 4 * t.steps, 32)
        ]
        old = []
        for begin in range(0, len(copies), t.token_chunks):
            batch = []
            for token, first in copies[begin : begin + t.token_chunks]:
                live = Int32((m > token) & (lane < 4 * t.steps - first))
                words = ptx.load_global_128_if(
                    self.token(x, token) + source,
                    live,
                    16 * first,
                    old.pop() if old else (),
                )
                at = area + token * t.staged_pitch + 16 * first + 16 * lane
                batch.append((at, live, words))
            for copied in batch:
                ptx.store_shared_128_if(*copied)
            old = [words for _, _, words in batch]
        cute.arch.sync_warp()
        return [
            (area + (8 * n + g) * t.staged_pitch + 16 * q, Int32(8 * n + g < m))
            for n in range(t.token_tiles)
        ]

    def multiply(self, weights, weight_words, token_words):
        """This warp's partial sums, each a list of a lane's four sums a token tile.

        ``weights`` are the steps in flight. Unrolled while it is traced.
        """
        t = self.t
        ahead = t.token_ahead
        tokens = [token_words(i) for i in range(ahead)]
        parts, total, whole = [], None, []
        for i in range(t.steps):
            if i % t.chunks == 0:
                acc = [(Float32(0.0),) * 4] * t.token_tiles
            w = weights.pop(0)
            xs = tokens.pop(0)
            for n in range(t.token_tiles):
                acc[n] = self.mma(w, xs[n], acc[n])
            if i + ahead < t.steps:
                tokens.append(token_words(i + ahead, xs))
            if i + t.depth * t.chunks < t.steps:
                weights.append(weight_words(i + t.depth * t.chunks, w))
            if (i + 1) % t.chunks:
                continue
            if not t.whole:
                parts.append(acc)
                continue
            total = acc if total is None else self.add(total, acc)
            segment = (i + 1) // t.chunks
            if segment % t.slice_segments == 0:
                # The balanced tree, as far as this warp's slices go.
                count = segment // t.slice_segments
                while count % 2 == 0:
                    total = self.add(whole.pop(), total)
                    count //= 2
                whole.append(total)
                total = None
        return parts or whole

    def add(self, a, b):
        return [add(u, v) for u, v in zip(a, b, strict=True)]

    def mma(self, w, x, acc):
        """32 columns: two steps of 16; word pairs 2h, 2h + 1 of each row."""
        zero = (Int32(0),) * 4
        low, high = w if self.t.halves == 2 else (w[0], zero)
        for h in range(2):
            acc = ptx.mma_16816(
                (low[2 * h], high[2 * h], low[2 * h + 1], high[2 * h + 1]),
                (x[2 * h], x[2 * h + 1]),
                acc,
            )
        return acc

    def leave(self, parts, at):
        t = self.t
        tile = cute.make_tensor(
            cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4),
            cute.make_layout(
                (2, 2, t.token_tiles, t.warp_parts),
                stride=(t.token_pitch, 8, 8 * t.token_pitch, t.part_pitch),
            ),
        )
        for p in range(t.warp_parts):
            for n in range(t.token_tiles):
                for i in range(2 * t.halves):
                    tile[i % 2, i // 2, n, p] = parts[p][n][i]

    @cute.jit
    def add_parts(self, ys, ws, base, thread, warp, first, height, m):
        """One barrier; then a lane a leaf of a token and row, turn after turn."""
        t = self.t
        leaf_bits = t.leaves.bit_length() - 1
        row_bits = t.rows.bit_length() - 1
        turn = t.threads >> leaf_bits
        leaf = thread & (t.leaves - 1)
        base = base + leaf * (4 * t.leaf_parts * t.part_pitch)
        # Where the first turn reads and writes is known before the barrier.
        item = thread >> leaf_bits
        row = item & (t.rows - 1)
        token = item >> row_bits
        at = base + 4 * (token * t.token_pitch + row)
        out, wide = self.place(ys, ws, token, first + row)
        live = (leaf == 0) & (row < height)
        begin = warp << (5 - leaf_bits)
        end = m << row_bits
        cute.arch.sync_threads()
        # A warp's lanes stay together for the shuffles; some may have no token.
        if begin < end:
            total = self.add_leaf(at)
            if live & (token < m):
                self.store(out, wide, total)
        if const_expr(turn < t.tokens * t.rows):
            for _ in cutlass.range(begin + turn, end, turn, unroll=1):
                item = item + turn
                row = item & (t.rows - 1)
                token = item >> row_bits
                out, wide = self.place(ys, ws, token, first + row)
                total = self.add_leaf(base + 4 * (token * t.token_pitch + row))
                if (leaf == 0) & (row < height) & (token < m):
                    self.store(out, wide, total)

    @cute.jit
    def add_leaf(self, at):
        """A leaf's parts in order, then the leaves, which adjacent lanes have."""
        t = self.t
        parts = cute.make_tensor(
            cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4),
            cute.make_layout(t.leaf_parts, stride=t.part_pitch),
        )
        total = parts[0]
        for p in cutlass.range_constexpr(1, t.leaf_parts):
            total = total + parts[p]
        for b in cutlass.range_constexpr(t.leaves.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << b)
        return total

    @cute.jit
    def store_own(self, ys, ws, part, g, q, first, height, m):
        """A warp's sums that are finished."""
        t = self.t
        for n in cutlass.range_constexpr(t.token_tiles):
            for i in cutlass.range_constexpr(2 * t.halves):
                row = g + i // 2 * 8
                token = 8 * n + 2 * q + i % 2
                out, wide = self.place(ys, ws, token, first + row)
                if (row < height) & (token < m):
                    self.store(out, wide, part[n][i])

    def place(self, ys, ws, token, row):
        """Address of an output, and whether it is fp32."""
        found = None
        begin = Int32(0)
        for g, (y, dtype) in enumerate(zip(ys, self.out_dtypes, strict=True)):
            at = Int64(token) * y.stride[0] + Int64(row - begin)
            at = y.iterator.toint() + at * (dtype.width // 8)
            wide = Boolean(dtype is Float32)
            if found:
                inside = row >= begin
                at = cutlass.select_(inside, at, found[0])
                wide = cutlass.select_(inside, wide, found[1])
            found = at, wide
            begin = begin + ws[g].shape[0]
        return found

    @cute.jit
    def store(self, out, wide, value):
        dtype = self.out_dtypes[0]
        if const_expr(len(set(self.out_dtypes)) > 1):
            narrow_out = self.output(out, BFloat16)
            wide_out = self.output(out, Float32)
            if wide:
                wide_out[0] = value
            else:
                narrow_out[0] = value.to(BFloat16)
        else:
            only = self.output(out, dtype)
            only[0] = value.to(dtype)

    def output(self, at, dtype):
        pointer = cute.make_ptr(
            dtype, at, cute.AddressSpace.gmem, assumed_align=dtype.width // 8
        )
        return cute.make_tensor(pointer, cute.make_layout(1))
