# SPDX-License-Identifier: Apache-2.0
"""The products per head before and after MLA's attention, for up to 64 rows.

    absorb     query_mh = [W_UK_h^T n_mh | p_mh],  [n_mh | p_mh] = q_mh
    value      out_mh = W_UV_h o_mh * sigmoid(gate_mh)

A CTA owns one head and 64 columns of the latent (absorb) or 16 values (value), for all
rows, eight at a time. Its weights are the 16-row operand of m16n8k16 and stay in
registers, the tokens the 8 columns. Both operands have k in one permutation, in which a
lane's 16 bytes of a token, columns 32 c + 8 q .. + 7, are the operands of two products
(`product`): no token passes through shared memory.

    absorb     W_UK has the latent, not k, along its rows: they come to shared memory by
               cp.async and from there by ldmatrix.trans. A warp has 16 columns of the
               latent and all of k. The CTA also copies p of every eighth row
    value      a warp has a quarter of k; the quarters are added in order through shared
               memory, by a thread a value and token, which applies the gate

Sums are fp32, rounded to bf16 once. Their order is fixed: two chains of products, even
and odd ones, added, then the quarters. No column of a product depends on another, so a
row has the same bits whatever is beside it.

Read once: weights and gate. Read by the eight CTAs of a head: the rows' n_h or o_h; of
rows past M nothing is read. Two tiles of rows are under way. Early loads: the weights.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.common import ptx
from verify_kernels.mla import ptx as mla_ptx
from verify_kernels.mla.parts import LATENT, LINE, NOPE, ROPE, VALUE

WARPS = 4
THREADS = 32 * WARPS
#: Rows of a product's operand of weights, and its tokens.
ROWS = 16
TOKENS = 8
#: CTAs of a head.
PARTS = 8
#: Columns of 16 bytes of a quad of lanes, and bytes.
CHUNK = 32
CHUNK_BYTES = 2 * CHUNK
#: Columns of W_UK of a CTA, and the bytes of a row of them in shared memory.
COLUMNS = LATENT // PARTS
PITCH = 2 * COLUMNS
#: Of a head in q.
QUERY = NOPE + ROPE
#: Of a warp along k.
QUARTER = LATENT // WARPS
#: Floats of two tokens in shared memory: the lanes of a store meet all banks, those of
#: a load too.
PAIR_PITCH = 2 * ROWS + 8
#: Of a warp's sums of a tile.
AREA = 4 * (TOKENS // 2) * PAIR_PITCH
LOG2_E = 1.4426950408889634


def chunks(address, count):
    """This lane's 16 bytes of each of a token's ``count`` chunks."""
    return [ptx.load_global_128(address, CHUNK_BYTES * c) for c in range(count)]


def next_chunks(address, live, old):
    """As `chunks`, if the token is live; else ``old``."""
    return [
        ptx.load_global_128_if(address, live, CHUNK_BYTES * c, words)
        for c, words in enumerate(old)
    ]


def first_tokens(at, pitch, token, m):
    """Where a lane's first token of two tiles lies, the last one's place if there are
    not so many: then the request needs no predicate, and no zeros for its registers."""
    tokens = [cutlass.min(token + TOKENS * i, m - 1) for i in range(2)]
    return [at + pitch * one for one in tokens]


def product(weights, tokens):
    """A lane's four sums of all chunks: ``weights[2 c + j]`` are A's registers of half
    j of chunk c, words 2 j and 2 j + 1 of ``tokens[c]`` B's."""
    sums = [(Float32(0.0),) * 4] * 2
    for i, a in enumerate(weights):
        c, j = i // 2, i % 2
        b = tokens[c][2 * j], tokens[c][2 * j + 1]
        sums[j] = ptx.mma_16816(a, b, sums[j])
    return [even + odd for even, odd in zip(*sums, strict=True)]


def sigmoid(x):
    """1 / (1 + e^-x): 0 at -inf, 1 at inf, NaN for NaN."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


class AbsorbKernel:
    """For any number of heads."""

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    parameters = ("q", "w_uk", "query")
    early_loads = ("w_uk",)
    threads = THREADS
    parts = PARTS
    #: W_UK's columns [NOPE, COLUMNS].
    shared_bytes = NOPE * PITCH

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 [M, H * 192], rows any multiple of 16 bytes apart
        w_uk: cute.Tensor,  # bf16 [H, 128, 512], heads as q's rows
        query: cute.Tensor,  # bf16 [M, H, 576], rows as q's
        pdl: Int32,
        stream,
    ):
        self.kernel(q, w_uk, query, q.shape[0]).launch(
            grid=[PARTS, w_uk.shape[0], 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            # As the GEMMs around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, q: cute.Tensor, w_uk: cute.Tensor, query: cute.Tensor, m: Int32):
        part, head, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        self.copy_weights(w_uk, base, part, head, thread)
        # Addresses here, so that the rows are requested right behind the wait, and
        # before this waits for the weights.
        pitch = Int64(2) * q.stride[0]
        head_at = q.iterator.toint() + Int64(2 * QUERY) * head
        first = lane >> 2
        at = head_at + 16 * (lane & 3)
        starts = first_tokens(at, pitch, first, m)
        # Row 8 i + part: eight lanes its p.
        row = TOKENS * (thread >> 3) + part
        copies = (row < m) & (thread < 8 * TOKENS)
        p_at = head_at + pitch * row + 2 * NOPE + 16 * (thread & 7)
        cute.arch.griddepcontrol_wait()
        x, other = [chunks(start, NOPE // CHUNK) for start in starts]
        rope = ptx.load_global_128_if(p_at, Int32(copies))
        # Not before the wait: launches that let the next one in first pile up. Behind
        # the requests: ptxas moves nothing past it, else the waits for the weights up.
        cute.arch.griddepcontrol_launch_dependents()
        ptx.wait_copies(0)
        cute.arch.sync_threads()
        weights = self.read_weights(base, warp, lane)
        out_pitch = Int64(2) * query.stride[0]
        out_at = query.iterator.toint() + Int64(2 * LINE) * head
        if copies:
            rope_at = out_at + out_pitch * row + 2 * LATENT + 16 * (thread & 7)
            ptx.store_global_128(rope_at, rope)
        # Where a lane stores: see `turned`.
        token = 2 * (lane & 3) + (first & 1)
        column = COLUMNS * part + ROWS * warp + 4 * (first & 2) + (first & 4)
        out_at = out_at + out_pitch * token + 2 * column
        for tile in cutlass.range(0, m, 2 * TOKENS, unroll=1):
            words = self.turned(product(weights, x), first)
            if tile + token < m:
                ptx.store_global_64(out_at, words)
            out_at = out_at + TOKENS * out_pitch
            there = tile + 2 * TOKENS + first
            x = next_chunks(at + pitch * there, Int32(there < m), x)
            if tile + TOKENS < m:
                words = self.turned(product(weights, other), first)
                if tile + TOKENS + token < m:
                    ptx.store_global_64(out_at, words)
            out_at = out_at + TOKENS * out_pitch
            there = there + TOKENS
            other = next_chunks(at + pitch * there, Int32(there < m), other)

    def copy_weights(self, w_uk, base, part, head, thread):
        """W_UK's columns of this CTA: a row k of 128 bytes by eight lanes. Which 16
        bytes of the row lie where depends on k, so that the eight rows that
        `read_weights` reads together meet all banks."""
        source = w_uk.iterator.toint() + Int64(2) * w_uk.stride[0] * head
        source = source + PITCH * part
        piece = thread & 7
        for i in range(8 * NOPE // THREADS):
            k = (thread >> 3) + THREADS // 8 * i
            key = ((k >> 2) & 6) | (k & 1)
            to = base + PITCH * k + 16 * (piece ^ key)
            from_at = source + 2 * LATENT * k + 16 * piece
            ptx.copy_async_128_if(to, from_at, Int32(1))
        ptx.commit_copies()

    def read_weights(self, base, warp, lane):
        """A's registers of this warp's 16 columns: step j of chunk c has the columns of
        k 32 c + 8 q + 4 j + {0, 1} and + {2, 3} in lane q of a quad, as `chunks`."""
        row = lane & 7
        matrix = lane >> 3
        # Row r of a matrix is that of lane r / 2, and the key of this k is r.
        k = 8 * (row >> 1) + (row & 1) + 2 * (matrix >> 1)
        piece = 2 * warp + (matrix & 1)
        at = base + PITCH * k + 16 * (piece ^ row)
        return [
            mla_ptx.load_columns(at, PITCH * (CHUNK * c + 4 * j))
            for c in range(NOPE // CHUNK)
            for j in range(2)
        ]

    def turned(self, sums, first):
        """Two words of neighbouring columns of one token.

        Lane 4 g + q has columns g and g + 8 of tokens 2 q and 2 q + 1. With lane g ^ 1
        it exchanges tokens, with g ^ 2 columns: then columns 4 (g & 2) + (g & 4) .. + 3
        of token 2 q + (g & 1), 32 bytes of every token a warp.
        """
        odd = (first & 1) != 0
        upper = (first & 2) != 0
        pairs = []
        for i in range(2):
            word = ptx.pack_bf16x2(sums[2 * i], sums[2 * i + 1])
            got = cute.arch.shuffle_sync_bfly(word, offset=4)
            even_word = ptx.permute(word, got, 0x5410)
            odd_word = ptx.permute(word, got, 0x3276)
            pairs.append(cutlass.select_(odd, odd_word, even_word))
        low, high = pairs
        kept = cutlass.select_(upper, high, low)
        got = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), offset=8)
        return cutlass.select_(upper, got, kept), cutlass.select_(upper, kept, got)


class ValueKernel:
    """For any number of heads."""

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    parameters = ("latent", "w_uv", "gate", "out")
    early_loads = ("w_uv",)
    threads = THREADS
    parts = PARTS
    #: The warps' sums of two tiles.
    shared_bytes = 2 * WARPS * AREA

    @cute.jit
    def __call__(
        self,
        latent: cute.Tensor,  # bf16 [M, H, 512], rows any multiple of 16 bytes apart
        w_uv: cute.Tensor,  # bf16 [H, 128, 512], heads as latent's rows
        gate: cute.Tensor,  # bf16 [M, H * 128], rows any distance apart
        out: cute.Tensor,  # bf16 [M, H * 128], rows any distance apart
        pdl: Int32,
        stream,
    ):
        self.kernel(latent, w_uv, gate, out, latent.shape[0]).launch(
            grid=[PARTS, w_uv.shape[0], 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            # As the GEMMs around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        latent: cute.Tensor,
        w_uv: cute.Tensor,
        gate: cute.Tensor,
        out: cute.Tensor,
        m: Int32,
    ):
        part, head, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        first = lane >> 2
        within = 2 * QUARTER * warp + 16 * (lane & 3)
        w_at = w_uv.iterator.toint() + Int64(2) * w_uv.stride[0] * head
        w_at = w_at + 2 * LATENT * (ROWS * part + first) + within
        weights = self.load_weights(w_at)
        # Addresses here, so that the rows are requested right behind the wait.
        pitch = Int64(2) * latent.stride[0]
        at = latent.iterator.toint() + Int64(2 * LATENT) * head + within
        starts = first_tokens(at, pitch, first, m)
        # A thread adds and stores one value of one token of a tile.
        token = thread >> 4
        column = VALUE * head + ROWS * part + (thread & 15)
        put = base + AREA * warp + 4 * (PAIR_PITCH * (lane & 3) + first)
        get = base + 4 * (
            PAIR_PITCH * (token >> 1) + ROWS * (token & 1) + (thread & 15)
        )
        cute.arch.griddepcontrol_wait()
        x, other = [chunks(start, QUARTER // CHUNK) for start in starts]
        raw = gate[cutlass.min(token, m - 1), column]
        other_raw = gate[cutlass.min(token + TOKENS, m - 1), column]
        # Not before the wait: launches that let the next one in first pile up. Behind
        # the requests: ptxas moves nothing past it, else the waits for the weights up.
        cute.arch.griddepcontrol_launch_dependents()
        for tile in cutlass.range(0, m, 2 * TOKENS, unroll=1):
            self.leave(put, product(weights, x))
            there = tile + 2 * TOKENS + first
            x = next_chunks(at + pitch * there, Int32(there < m), x)
            # One barrier a tile: a place is written anew only behind the next one,
            # which all reach when they have read it.
            cute.arch.sync_threads()
            self.finish(out, get, tile + token, column, raw, m)
            raw = gate[cutlass.min(tile + 2 * TOKENS + token, m - 1), column]
            if tile + TOKENS < m:
                self.leave(put + WARPS * AREA, product(weights, other))
                cute.arch.sync_threads()
                self.finish(
                    out, get + WARPS * AREA, tile + TOKENS + token, column, other_raw, m
                )
            there = there + TOKENS
            other = next_chunks(at + pitch * there, Int32(there < m), other)
            other_raw = gate[cutlass.min(tile + 3 * TOKENS + token, m - 1), column]

    def load_weights(self, at):
        """A's registers of values g and g + 8, from the first one's address."""
        found = []
        for c in range(QUARTER // CHUNK):
            # Not `load_weights_128`: ptxas moves a .nc load down past the wait.
            low = ptx.load_global_128(at, CHUNK_BYTES * c)
            high = ptx.load_global_128(at, 2 * LATENT * 8 + CHUNK_BYTES * c)
            for j in range(2):
                found.append((low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]))
        return found

    def leave(self, at, sums):
        """A lane's sums of values g and g + 8 of tokens 2 q and 2 q + 1."""
        for i, value in enumerate(sums):
            offset = 4 * (ROWS * (i % 2) + 8 * (i // 2))
            ptx.store_shared_f32(at + offset, value)

    @cute.jit
    def finish(self, out, at, row, column, raw, m):
        pointer = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4)
        areas = cute.make_layout(WARPS, stride=AREA // 4)
        quarters = cute.make_tensor(pointer, areas)
        total = quarters[0]
        for w in cutlass.range_constexpr(1, WARPS):
            total = total + quarters[w]
        if row < m:
            gated = total * sigmoid(raw.to(Float32))
            out[row, column] = gated.to(cutlass.BFloat16)
