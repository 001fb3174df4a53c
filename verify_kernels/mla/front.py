# SPDX-License-Identifier: Apache-2.0
"""What MLA does with a packed row before the query's projection, one launch:

    out    = RMSNorm(q_a) * q_norm
    line   = [RMSNorm(kv_a[:512]) * kv_norm | kv_a[512:]],  to the row's place in the
             cache: line p mod page of the page block_table[b, p // page]

with [q_a | kv_a | ...] the packed row, b its request and p its position, history + t
for row t of b, less the step's rows of b where history counts them already.

A CTA owns a row, a thread eight columns of q_a or of the latent, so a warp only of one
of the two; eight threads of the latent also copy eight of the last 64 columns each. The
two norms share one barrier.

    loads       all of the row that is needed, the limits, histories and slots of all
                requests, two a lane, at once; then, by the latent's warps, the page
    request     as many as end at or before this row come before it: a vote
    norm        the sum of squares of eight columns, a warp's by a butterfly, then the
                warps' in order; fp32, rounded to bf16 once

A row's bits depend on its own columns alone. The row of no request, padding or a slot
<= 0, gives 0 and no line, nor does a negative page or a position that is not in the
table give a line.

Read once: the row. Read by every CTA: norms, limits, histories and slots. Early loads:
the two norms' weights. The gate behind the row's 576 + q_lora columns is not read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.common.arithmetic import halves
from verify_kernels.mla.parts import LATENT, LINE, ROPE

LANES = 32
#: Columns of a thread: 16 bytes.
VECTOR = 8
#: Requests of a lane: none has more than all rows, and most have one.
HELD = MAX_ROWS // LANES
#: Of a row, between a latent column and the one that the same thread copies.
ROPE_BYTES = 2 * LATENT


class FrontKernel:
    """For up to 64 requests.

    Args:
        q_lora: columns of q_a, a multiple of 256 up to 7680.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    parameters = (
        "packed",
        "q_norm",
        "kv_norm",
        "cache",
        "block_table",
        "row_start",
        "history",
        "slots",
        "out",
    )
    early_loads = ("q_norm", "kv_norm")

    def __init__(self, q_lora: int):
        if q_lora % (VECTOR * LANES):
            raise ValueError(
                f"q_lora={q_lora}; a warp has {VECTOR * LANES} columns, so it must be "
                "a multiple of that"
            )
        self.q_lora = q_lora
        self.q_threads = q_lora // VECTOR
        self.threads = self.q_threads + LATENT // VECTOR
        self.warps = self.threads // LANES
        # Shared memory: each warp's sum of squares; they are read by fours.
        self.shared_bytes = 16 * -(-self.warps // 4)

    @cute.jit
    def __call__(
        self,
        packed: cute.Tensor,  # bf16 [M, P], rows any multiple of 16 bytes apart
        q_norm: cute.Tensor,
        kv_norm: cute.Tensor,
        cache: cute.Tensor,  # bf16 [blocks, page, 576], blocks as packed's rows
        block_table: cute.Tensor,  # int32 [B, N], rows any distance apart
        row_start: cute.Tensor,
        history: cute.Tensor,
        slots: cute.Tensor,
        out: cute.Tensor,  # bf16 [M, q_lora], rows as packed's
        eps: Float32,
        counted: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            packed,
            q_norm,
            kv_norm,
            cache,
            block_table,
            row_start,
            history,
            slots,
            out,
            cache.shape[1],
            block_table.shape[1],
            eps,
            counted,
        ).launch(
            grid=[packed.shape[0], 1, 1],
            block=[self.threads, 1, 1],
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
        packed: cute.Tensor,
        q_norm: cute.Tensor,
        kv_norm: cute.Tensor,
        cache: cute.Tensor,
        block_table: cute.Tensor,
        row_start: cute.Tensor,
        history: cute.Tensor,
        slots: cute.Tensor,
        out: cute.Tensor,
        page: Int32,
        pages: Int32,
        eps: Float32,
        counted: Int32,
    ):
        row, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        mine = thread - self.q_threads
        of_line = mine >= 0
        weight_at = cutlass.select_(
            of_line,
            kv_norm.iterator.toint() + Int64(2 * VECTOR) * mine,
            q_norm.iterator.toint() + Int64(2 * VECTOR) * thread,
        )
        # Not a .nc load, which ptxas moves down past the wait.
        weight_words = ptx.load_global_128(weight_at)
        # kv_a follows q_a, so threads follow the columns.
        at = packed.iterator.toint() + Int64(2) * packed.stride[0] * row
        at = at + 2 * VECTOR * thread
        cute.arch.griddepcontrol_wait()
        # Not earlier: a chain of launches that let the next one in first piles up.
        cute.arch.griddepcontrol_launch_dependents()

        words = ptx.load_global_128(at)
        copies = of_line & (mine < ROPE // VECTOR)
        rope_words = ptx.load_global_128_if(at, Int32(copies), ROPE_BYTES)
        request, position, live = self.find(
            row_start, history, slots, row, counted, lane
        )
        line_at = Int64(0)
        if of_line & live & (position >= 0):
            column = Int32(Uint32(position) // Uint32(page))
            if column < pages:
                block = block_table[request, column]
                if block >= 0:
                    line = position - column * page
                    line_at = cache.stride[0] * Int64(block) + LINE * Int64(line)
                    line_at = cache.iterator.toint() + 2 * line_at + 2 * VECTOR * mine

        x = [value for word in words for value in halves(word)]
        square = x[0] * x[0]
        for j in cutlass.range_constexpr(1, VECTOR):
            square = cute.math.fma(x[j], x[j], square)
        square = cute.arch.warp_reduction_sum(square)
        sums = self.sums(base)
        if lane == 0:
            ptx.store_shared_f32(base + 4 * (thread >> 5), square)
        cute.arch.sync_threads()
        total = Float32(0.0)
        for w in cutlass.range_constexpr(self.warps):
            inside = of_line == (LANES * w >= self.q_threads)
            total = total + cutlass.select_(inside, sums[w], Float32(0.0))
        share = cutlass.select_(
            of_line, Float32(1.0 / LATENT), Float32(1.0 / self.q_lora)
        )
        spread = cute.math.rsqrt(cute.math.fma(total, share, eps), fastmath=True)
        scale = [value for word in weight_words for value in halves(word)]
        y = [value * spread * g for value, g in zip(x, scale, strict=True)]
        packed_y = [ptx.pack_bf16x2(y[2 * i], y[2 * i + 1]) for i in range(4)]
        if of_line:
            if line_at != 0:
                ptx.store_global_128(line_at, packed_y)
                if copies:
                    ptx.store_global_128(line_at + ROPE_BYTES, rope_words)
        else:
            # Selected, not multiplied: the row may hold anything.
            normed = [cutlass.select_(live, word, Int32(0)) for word in packed_y]
            out_at = out.iterator.toint() + Int64(2) * out.stride[0] * row
            ptx.store_global_128(out_at + 2 * VECTOR * thread, normed)

    def sums(self, base):
        pointer = cute.make_ptr(Float32, base, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(self.warps))

    @cute.jit
    def find(self, row_start, history, slots, row, counted, lane):
        """The row's request, its position, and whether there is a request at all; by a
        whole warp. All of a row's numbers are loaded before it is known which."""
        requests = history.shape[0]
        held = [lane + LANES * i for i in range(HELD)]
        place = [cutlass.min(index, requests - 1) for index in held]
        ends = [row_start[index + 1] for index in place]
        counts = [history[index] for index in place]
        states = [slots[index] for index in place]
        request = Int32(0)
        for i in cutlass.range_constexpr(HELD):
            before = (held[i] < requests) & (ends[i] <= row)
            request = request + cute.arch.popc(cute.arch.vote_ballot_sync(before))
        begin = self.of(ends, request - 1)
        begin = cutlass.select_(request > 0, begin, Int32(0))
        position = self.of(counts, request) + row - begin
        width = self.of(ends, request) - begin
        position = cutlass.select_(counted != 0, position - width, position)
        live = (request < requests) & (self.of(states, request) > 0)
        return request, position, live

    def of(self, values, index):
        """The value of a request, of which lane l has those of l, l + 32, ...; of any
        for an index that there is not."""
        found = cute.arch.shuffle_sync(values[0], index & (LANES - 1))
        for i in range(1, HELD):
            other = cute.arch.shuffle_sync(values[i], index & (LANES - 1))
            found = cutlass.select_(index >= LANES * i, other, found)
        return found
