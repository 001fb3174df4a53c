# SPDX-License-Identifier: Apache-2.0
"""The sum of a row's splits: with M = max_i m_i over the splits that hold keys of it,

    latent = sum_i 2^(m_i - M) o_i / L,  L = sum_i 2^(m_i - M) l_i,
    lse = (M + log2 L) ln 2

o_i, m_i and l_i as `verify_kernels.mla.attend` leaves them (m in units of log2). The
sums run in the order of the keys, L in a tree over all splits that a row may have.

A CTA owns a (row, head) pair, a thread four latent columns. Rows of no request give 0
and -inf. Read once: the sums. Early loads: none.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.mla import plan
from verify_kernels.mla.attend import LATENT

THREADS = LATENT // 4
#: Splits whose sums are under way at once.
AHEAD = 8
LN_2 = 0.6931471805599453


class MergeKernel:
    """For any number of heads and rows."""

    pdl = True
    parameters = ("sums", "scales", "row_start", "history", "slots", "latent", "lse")
    early_loads = ()
    early_release = "dependents wait before they read what this kernel stores"
    shared_bytes = 0

    @cute.jit
    def __call__(
        self,
        sums: cute.Tensor,  # fp32 [M' H, S, 512]
        scales: cute.Tensor,  # fp32 [M' H, S, 2]
        row_start: cute.Tensor,  # int32 [B + 1]
        history: cute.Tensor,  # int32 [B]
        slots: cute.Tensor,  # int32 [B]
        latent: cute.Tensor,  # bf16 [M, H, 512]
        lse: cute.Tensor,  # fp32 [M, H]
        most: Int32,
        causal: Int32,
        counted: Int32,
        wanted: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            sums,
            scales,
            row_start,
            history,
            slots,
            latent,
            lse,
            most,
            causal,
            counted,
            wanted,
        ).launch(
            grid=[latent.shape[1], latent.shape[0], 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        sums: cute.Tensor,
        scales: cute.Tensor,
        row_start: cute.Tensor,
        history: cute.Tensor,
        slots: cute.Tensor,
        latent: cute.Tensor,
        lse: cute.Tensor,
        most: Int32,
        causal: Int32,
        counted: Int32,
        wanted: Int32,
    ):
        head, row, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        heads = latent.shape[1]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        keys = self.keys_of(row, lane, row_start, history, slots, causal, counted)
        bits = plan.split_bits(keys, most)
        splits = (keys + ((Int32(1) << bits) - 1)) >> bits
        place = Int64(row * heads + head) << Int64(most)
        tops, totals = [], []
        for half in cutlass.range_constexpr(2):
            split = lane + 32 * half
            there = split < splits
            split = cutlass.select_(there, split, Int32(0))
            at = scales.iterator.toint() + (place + split) * 8
            found = ptx.load_global_64(at)
            top, total = (ptx.float_from_bits(v) for v in found)
            tops.append(cutlass.select_(there, top, Float32(-Float32.inf)))
            totals.append(cutlass.select_(there, total, Float32(0.0)))
        highest = cute.arch.fmax(tops[0], tops[1])
        for bit in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(highest, offset=1 << bit)
            highest = cute.arch.fmax(highest, other)
        shares = []
        for half in cutlass.range_constexpr(2):
            split = lane + 32 * half
            share = cute.math.exp2(tops[half] - highest, fastmath=True)
            shares.append(cutlass.select_(split < splits, share, Float32(0.0)))
        whole = shares[0] * totals[0] + shares[1] * totals[1]
        for bit in cutlass.range_constexpr(5):
            whole = whole + cute.arch.shuffle_sync_bfly(whole, offset=1 << bit)
        y = [Float32(0.0)] * 4
        at = sums.iterator.toint() + place * (4 * LATENT) + thread * 16
        for first in cutlass.range(0, splits, AHEAD, unroll=1):
            words = []
            for i in cutlass.range_constexpr(AHEAD):
                split = cutlass.min(first + i, splits - 1)
                words.append(ptx.load_global_f32x4(at + Int64(split) * (4 * LATENT)))
            for i in cutlass.range_constexpr(AHEAD):
                split = first + i
                shared = cutlass.select_(split < 32, shares[0], shares[1])
                share = cute.arch.shuffle_sync(shared, split & 31)
                for j in cutlass.range_constexpr(4):
                    new = cute.math.fma(share, words[i][j], y[j])
                    y[j] = cutlass.select_(split < splits, new, y[j])
        inverse = cutlass.select_(splits > 0, 1.0 / whole, Float32(0.0))
        y = [v * inverse for v in y]
        to = latent.iterator.toint() + Int64(row * heads + head) * (2 * LATENT)
        ptx.store_global_64(
            to + thread * 8, [ptx.pack_bf16x2(y[0], y[1]), ptx.pack_bf16x2(y[2], y[3])]
        )
        if (wanted != 0) & (thread == 0):
            value = (highest + cute.math.log2(whole, fastmath=True)) * LN_2
            lse[row, head] = cutlass.select_(splits > 0, value, Float32(-Float32.inf))

    def keys_of(self, row, lane, row_start, history, slots, causal, counted):
        """Keys that the row sees, 0 if it is no request's."""
        requests = history.shape[0]
        before = Int32(0)
        for half in range(MAX_ROWS // 32):
            index = lane + 32 * half
            there = index < requests
            ends = row_start[cutlass.select_(there, index + 1, requests)]
            before = before + cute.arch.popc(
                cute.arch.vote_ballot_sync(there & (ends <= row))
            )
        live = before < requests
        request = cutlass.min(before, requests - 1)
        first = row_start[request]
        width = row_start[request + 1] - first
        past = history[request] - cutlass.select_(counted != 0, width, Int32(0))
        seen = cutlass.select_(causal != 0, row - first + 1, width)
        live = live & (slots[request] > 0)
        return cutlass.select_(live, past + seen, Int32(0))
