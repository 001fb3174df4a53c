# SPDX-License-Identifier: Apache-2.0
"""Attention residuals, one launch: prefix update, block write, mix, RMSNorm.

A cluster of H / 1024 CTAs owns one token, a CTA 1024 columns of it, a thread 8 columns
of every source, which it reads once, all reads in flight together; H = 512 has two CTAs
of a warp. The sums over H then cross the cluster twice:

    scores      every thread has (sum wn wq v_i, sum v_i^2) over its columns. Warps add
                theirs by halving exchanges, the CTA adds its warps, and sends the
                result to every CTA, which adds the CTAs' in rank order
    output      the sum of h^2, sent by each warp to every CTA, added in the same order

No step depends on M or on another token, so rows are bit-invariant. Roundings are those
of vLLM's kernel: the new prefix to bf16 before it is used, the result once at the end;
and delta + extra, where there is one, as if it had been a tensor.

Early loads: the three weight vectors. The saved blocks were written by earlier kernels,
perhaps of this step, so they are read after the wait. No trailing cluster barrier is
needed: a CTA leaves only when all that its peers send it has arrived, and nothing reads
a peer's memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from verify_kernels.common import ptx
from verify_kernels.common.arithmetic import add_tree, halves

#: Threads of a CTA at most.
THREADS = 128
#: Columns of a thread: 16 bytes.
VECTOR = 8
#: H200: 64 rows are 448 CTAs, 3.4 an SM, and all should be resident at once.
CTAS_PER_SM = 4
LOG2_E = 1.4426950408889634
#: Two bf16 of -0: what is added to them stays what it is.
NOTHING = 0x80008000 - 2**32


def floats(words):
    return [x for word in words for x in halves(word)]


def sizes(count):
    """How many of ``count`` values a lane holds before and after each of five steps."""
    found = [count]
    for _ in range(5):
        found.append((found[-1] + 1) // 2)
    return found


class AttnResKernel:
    """One block count and one way of updating the prefix, for any number of rows.

    Args:
        hidden: H, 512 or a multiple of 1024 from 2048 to 8192.
        num_blocks: N, saved blocks that are mixed.
        update: "keep" the prefix, "add" delta, or delta + extra, to it, or "restart" it
            as delta.
        write: save the new prefix as block N.
        norm: apply the output norm.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"

    def __init__(
        self, hidden: int, num_blocks: int, update: str, write: bool, norm: bool
    ):
        self.hidden = hidden
        # Two CTAs at least: compute-sanitizer takes what a cluster of one sends to
        # itself for an invalid write (memcheck, 2026-11-30).
        self.threads = min(THREADS, hidden // VECTOR // 2)
        self.warps = self.threads // 32
        #: Columns of a CTA.
        self.slice = self.threads * VECTOR
        self.ctas = hidden // self.slice
        self.num_blocks = num_blocks
        self.update = update
        self.write = write
        self.norm = norm
        weights = ("norm_weight", "query_weight")
        if norm:
            weights += ("output_norm_weight",)
        delta = {"keep": (), "restart": ("delta",), "add": ("delta", "extra")}[update]
        self.parameters = ("prefix", *delta, "blocks", *weights, "out")
        self.early_loads = weights if num_blocks else weights[2:]

        # Shared memory: two barriers; each warp's sums; each CTA's sums, as pairs (dot,
        # squares) a source in whole 16-byte quads; each warp's sum of h^2, by CTA.
        self.values = 2 * (num_blocks + 1)
        self.quads = (self.values + 3) // 4
        self.pitch = 16 * self.quads
        self.own_sums = 16
        self.all_sums = self.own_sums + self.warps * self.pitch
        self.all_squares = self.all_sums + self.ctas * self.pitch
        self.shared_bytes = self.all_squares + self.ctas * 4 * self.warps

    @cute.jit
    def __call__(
        self,
        prefix: cute.Tensor,
        delta,
        extra,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        query_weight: cute.Tensor,
        output_norm_weight,
        out: cute.Tensor,
        eps: Float32,
        output_norm_eps: Float32,
        has_extra: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            prefix,
            delta,
            extra,
            blocks,
            norm_weight,
            query_weight,
            output_norm_weight,
            out,
            eps,
            output_norm_eps,
            has_extra,
        ).launch(
            grid=[self.ctas, prefix.shape[0], 1],
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            # Lets ptxas use 128 registers; left alone it spilled one form to get 72.
            min_blocks_per_mp=CTAS_PER_SM,
            # As the GEMMs around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        prefix: cute.Tensor,
        delta,
        extra,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        query_weight: cute.Tensor,
        output_norm_weight,
        out: cute.Tensor,
        eps: Float32,
        output_norm_eps: Float32,
        has_extra: Int32,
    ):
        rank, row, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        scores_full = base
        squares_full = base + 8
        if thread == 0:
            if const_expr(self.num_blocks > 0):
                self.expect(scores_full, self.ctas * self.pitch)
            if const_expr(self.norm):
                self.expect(squares_full, self.ctas * 4 * self.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()

        at = Int64(2 * self.slice) * rank + 2 * VECTOR * thread
        # Not `load_weights_128`: ptxas moves a .nc load down past the wait.
        if const_expr(self.num_blocks > 0):
            norm_words = ptx.load_global_128(norm_weight.iterator.toint() + at)
            query_words = ptx.load_global_128(query_weight.iterator.toint() + at)
        if const_expr(self.norm):
            scale_words = ptx.load_global_128(output_norm_weight.iterator.toint() + at)
        cute.arch.griddepcontrol_wait()

        prefix_at = self.row(prefix, row) + at
        blocks_at = self.row(blocks, row) + at
        block_bytes = Int64(2) * blocks.stride[1]
        if const_expr(self.update != "restart"):
            prefix_words = ptx.load_global_128(prefix_at)
        if const_expr(self.update != "keep"):
            delta_words = ptx.load_global_128(self.row(delta, row) + at)
        if const_expr(self.update == "add"):
            extra_words = ptx.load_global_128_if(
                self.row(extra, row) + at, has_extra, 0, (Int32(NOTHING),) * 4
            )
        sources = []
        for i in cutlass.range_constexpr(self.num_blocks):
            sources.append(ptx.load_global_128(blocks_at + block_bytes * i))

        if const_expr(self.update == "keep"):
            new_words = prefix_words
        elif const_expr(self.update == "restart"):
            new_words = delta_words
        else:
            delta_words = self.sum_of(delta_words, extra_words)
            new_words = self.sum_of(prefix_words, delta_words)
        if const_expr(self.update != "keep"):
            ptx.store_global_128(prefix_at, new_words)
        if const_expr(self.write):
            ptx.store_global_128(blocks_at + block_bytes * self.num_blocks, new_words)

        h = floats(new_words)
        if const_expr(self.num_blocks > 0):
            sources.append(new_words)
            score_weight = [
                a * b
                for a, b in zip(floats(norm_words), floats(query_words), strict=True)
            ]
            self.send_sums(sources, score_weight, base, rank, thread)
            ptx.wait_cluster(scores_full, 0)
            h = self.mix(sources, base + self.all_sums, eps)
        else:
            cute.arch.cluster_wait()

        if const_expr(self.norm):
            squares = h[0] * h[0]
            for j in cutlass.range_constexpr(1, VECTOR):
                squares = squares + h[j] * h[j]
            squares = cute.arch.warp_reduction_sum(squares)
            lane = cute.arch.lane_idx()
            slot = base + self.all_squares + 4 * (rank * self.warps + thread // 32)
            if lane < self.ctas:
                ptx.store_remote_f32(slot, squares, squares_full, lane)
            scale = floats(scale_words)
            ptx.wait_cluster(squares_full, 0)
            everything = Float32(0.0)
            if const_expr(self.warps == 1):
                for of_cta in ptx.load_shared_f32x2(base + self.all_squares):
                    everything = everything + of_cta
            else:
                for r in cutlass.range_constexpr(self.ctas):
                    of_warps = ptx.load_shared_f32x4(base + self.all_squares, 16 * r)
                    everything = everything + add_tree(of_warps)
            spread = self.rsqrt_mean(everything, output_norm_eps)
            h = [x * spread * w for x, w in zip(h, scale, strict=True)]
        ptx.store_global_128(self.row(out, row) + at, self.pack(h))

    @cute.jit
    def expect(self, barrier, size):
        """A barrier that opens when ``size`` bytes have arrived, once."""
        pointer = cute.make_ptr(
            cutlass.Int64, barrier, cute.AddressSpace.smem, assumed_align=8
        )
        cute.arch.mbarrier_init(pointer, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(pointer, size)

    @cute.jit
    def row(self, tensor, row):
        """Address of a row; 64-bit, since a row stride is the caller's."""
        return tensor.iterator.toint() + Int64(2) * tensor.stride[0] * row

    @cute.jit
    def pack(self, values):
        return tuple(
            ptx.pack_bf16x2(values[2 * j], values[2 * j + 1]) for j in range(4)
        )

    def sum_of(self, a, b):
        """In bf16."""
        pairs = zip(floats(a), floats(b), strict=True)
        return self.pack([x + y for x, y in pairs])

    @cute.jit
    def rsqrt_mean(self, squares, eps):
        return cute.math.rsqrt(squares * (1.0 / self.hidden) + eps, fastmath=True)

    @cute.jit
    def send_sums(self, sources, score_weight, base, rank, thread):
        """This CTA's pairs of sums to all CTAs of the cluster."""
        lane = cute.arch.lane_idx()
        warp = thread // 32
        sums = []
        for i in cutlass.range_constexpr(self.num_blocks + 1):
            v = floats(sources[i])
            dot = score_weight[0] * v[0]
            square = v[0] * v[0]
            for j in cutlass.range_constexpr(1, VECTOR):
                dot = dot + score_weight[j] * v[j]
                square = square + v[j] * v[j]
            sums.append(dot)
            sums.append(square)
        value, place, valid = self.halve(sums, lane)
        own = base + self.own_sums
        if valid:
            ptx.store_shared_f32(own + warp * self.pitch + 4 * place, value)
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        peer = thread // 8
        quad = thread % 8
        if (peer < self.ctas) & (quad < self.quads):
            parts = [
                ptx.load_shared_f32x4(own + 16 * quad, w * self.pitch)
                for w in range(self.warps)
            ]
            total = [add_tree(of_warps) for of_warps in zip(*parts, strict=True)]
            there = base + self.all_sums + rank * self.pitch + 16 * quad
            ptx.store_remote_f32x4(there, total, base, peer)

    @cute.jit
    def halve(self, values, lane):
        """Sums of a list over the warp, spread over its lanes.

        At each step a lane passes half of its values to a partner and takes the
        partner's part of the other half: 20 exchanges for 18 values instead of 90.
        Returns a lane's sum, its place in the list, and whether it has one.
        """
        held = sizes(self.values)
        zero = Float32(0.0)
        for step in cutlass.range_constexpr(5):
            offset = 16 >> step
            upper = (lane & offset) != 0
            keep = held[step + 1]
            if const_expr(held[step] > 1):
                padded = [*values, zero][: 2 * keep]
                kept = [
                    cutlass.select_(upper, padded[keep + j], padded[j])
                    for j in range(keep)
                ]
                passed = [
                    cutlass.select_(upper, padded[j], padded[keep + j])
                    for j in range(keep)
                ]
            else:
                kept = values
                passed = values
            values = [
                a + cute.arch.shuffle_sync_bfly(b, offset=offset)
                for a, b in zip(kept, passed, strict=True)
            ]
        place = Int32(0)
        valid = lane >= 0
        for step in cutlass.range_constexpr(4, -1, -1):
            bit = (lane >> (4 - step)) & 1
            place = place + bit * held[step + 1]
            valid = valid & (place < held[step])
        return values[0], place, valid

    @cute.jit
    def mix(self, sources, all_sums, eps):
        """The softmax of the scores, and the sources mixed by it: 8 columns."""
        lane = cutlass.min(cute.arch.lane_idx(), Int32(self.num_blocks))
        dot = Float32(0.0)
        square = Float32(0.0)
        for r in cutlass.range_constexpr(self.ctas):
            pair = ptx.load_shared_f32x2(all_sums + 8 * lane, r * self.pitch)
            dot = dot + pair[0]
            square = square + pair[1]
        score = dot * self.rsqrt_mean(square, eps)
        scores = [cute.arch.shuffle_sync(score, i) for i in range(self.num_blocks + 1)]
        largest = scores[0]
        for i in cutlass.range_constexpr(1, self.num_blocks + 1):
            largest = cute.arch.fmax(largest, scores[i])
        shares = [cute.math.exp2((s - largest) * LOG2_E, fastmath=True) for s in scores]
        total = shares[0]
        for i in cutlass.range_constexpr(1, self.num_blocks + 1):
            total = total + shares[i]
        h = [shares[0] * v for v in floats(sources[0])]
        for i in cutlass.range_constexpr(1, self.num_blocks + 1):
            v = floats(sources[i])
            h = [h[j] + shares[i] * v[j] for j in range(VECTOR)]
        inverse = cute.arch.rcp_approx(total)
        return [x * inverse for x in h]
