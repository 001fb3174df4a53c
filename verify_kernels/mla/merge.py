# SPDX-License-Identifier: Apache-2.0
"""The sum of a row's splits: with M = max_i m_i over the splits that hold keys of it,

    latent = sum_i 2^(m_i - M) o_i / L,  L = sum_i 2^(m_i - M) l_i,
    lse = (M + log2 L) ln 2

o_i, m_i and l_i as `verify_kernels.mla.attend` leaves them (m in units of log2).

A CTA owns a (row, head) pair, each of its four groups of threads every fourth split, a
thread four latent columns. A group adds its splits in the order of the keys, then the
groups' sums are added in pairs; L is a tree over all splits that a row may have. Rows
of no request give 0 and -inf. Read once: the sums. Early loads: none.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.common.shared import put
from verify_kernels.mla import plan
from verify_kernels.mla.parts import LATENT

COLUMNS = LATENT // 4
GROUPS = 4
THREADS = GROUPS * COLUMNS
#: Splits of a group that are asked for before the lengths are known, and at once then:
#: 16 of all, and the 48 more that there may be in two turns.
BLIND = 4
AHEAD = 6
LN_2 = 0.6931471805599453


class MergeKernel:
    """For any number of heads and rows."""

    pdl = True
    parameters = ("sums", "scales", "row_start", "history", "slots", "latent", "lse")
    early_loads = ()
    early_release = "dependents wait before they read what this kernel stores"
    #: Splits under way, then the sums of the groups but the first.
    shared_bytes = 16 * THREADS * AHEAD + 4 * LATENT * (GROUPS - 1)

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
        # Everything that needs no other number first, splits too of which nothing is
        # known yet: requests one behind the other cost half a microsecond each.
        place = Int64(row * heads + head) << Int64(most)
        last = (Int32(1) << most) - 1
        group = thread // COLUMNS
        column = thread % COLUMNS * 4
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        at = sums.iterator.toint() + place * (4 * LATENT) + column * 4
        # Loads to registers ptxas puts off until a split is to be added, and copies
        # until the lengths have come, where no barrier stands in between.
        ours = base + thread * 16
        self.ask(ours, at, group, last, BLIND)
        cute.arch.sync_threads()
        found = []
        for half in cutlass.range_constexpr(2):
            split = cutlass.min(lane + 32 * half, last)
            found.append(
                ptx.load_global_64(scales.iterator.toint() + (place + split) * 8)
            )
        keys = self.keys_of(row, lane, row_start, history, slots, causal, counted)
        bits = plan.split_bits(keys, most)
        splits = (keys + ((Int32(1) << bits) - 1)) >> bits
        tops, totals = [], []
        for half in cutlass.range_constexpr(2):
            there = lane + 32 * half < splits
            top, total = (ptx.float_from_bits(v) for v in found[half])
            tops.append(cutlass.select_(there, top, Float32(-Float32.inf)))
            totals.append(cutlass.select_(there, total, Float32(0.0)))
        highest = cute.arch.fmax(tops[0], tops[1])
        for bit in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(highest, offset=1 << bit)
            highest = cute.arch.fmax(highest, other)
        shares = []
        for half in cutlass.range_constexpr(2):
            share = cute.math.exp2(tops[half] - highest, fastmath=True)
            there = lane + 32 * half < splits
            shares.append(cutlass.select_(there, share, Float32(0.0)))
        whole = shares[0] * totals[0] + shares[1] * totals[1]
        for bit in cutlass.range_constexpr(5):
            whole = whole + cute.arch.shuffle_sync_bfly(whole, offset=1 << bit)
        y = self.add([Float32(0.0)] * 4, ours, shares, group, splits, BLIND)
        first, zero = group + GROUPS * BLIND, most >> 31
        for begin in cutlass.range(first, splits, GROUPS * AHEAD, unroll=1):
            # Behind what has been read of the places: the sums need it.
            tie = ptx.float_bits(y[0]) & zero
            self.ask(ours + tie, at, begin, splits - 1, AHEAD)
            y = self.add(y, ours, shares, begin, splits, AHEAD)
        sums_at = base + 16 * THREADS * AHEAD
        mine = sums_at + ((group - 1) * LATENT + column) * 4
        if group > 0:
            for j in cutlass.range_constexpr(4):
                put(mine + 4 * j, y[j], Float32)
        cute.arch.sync_threads()
        if group == 0:
            mine = sums_at + column * 4
            others = [
                ptx.load_shared_f32x4(mine, 4 * LATENT * i) for i in range(GROUPS - 1)
            ]
            inverse = cutlass.select_(splits > 0, 1.0 / whole, Float32(0.0))
            y = [
                (v + others[0][j] + (others[1][j] + others[2][j])) * inverse
                for j, v in enumerate(y)
            ]
            to = latent.iterator.toint() + Int64(row * heads + head) * (2 * LATENT)
            ptx.store_global_64(
                to + column * 2,
                [ptx.pack_bf16x2(y[0], y[1]), ptx.pack_bf16x2(y[2], y[3])],
            )
            if (wanted != 0) & (thread == 0):
                value = (highest + cute.math.log2(whole, fastmath=True)) * LN_2
                lse[row, head] = cutlass.select_(
                    splits > 0, value, Float32(-Float32.inf)
                )

    def ask(self, to, at, first, last, count):
        """Copies a thread's columns of its group's next splits, ``last`` the last."""
        for i in range(count):
            split = first + GROUPS * i
            ptx.copy_async_128_if(
                to,
                at + Int64(split) * (4 * LATENT),
                Int32(split <= last),
                16 * THREADS * i,
            )
        ptx.commit_copies()

    def add(self, y, at, shares, first, splits, count):
        """Plus those splits, as far as there are any."""
        ptx.wait_copies(0)
        for i in range(count):
            split = first + GROUPS * i
            of_half = cutlass.select_(split < 32, shares[0], shares[1])
            share = cute.arch.shuffle_sync(of_half, split & 31)
            columns = ptx.load_shared_f32x4(at, 16 * THREADS * i)
            y = [
                cutlass.select_(split < splits, cute.math.fma(share, w, v), v)
                for w, v in zip(columns, y, strict=True)
            ]
        return y

    def keys_of(self, row, lane, row_start, history, slots, causal, counted):
        """Keys that the row sees, 0 if it is no request's."""
        requests = history.shape[0]
        before, held = Int32(0), []
        for half in range(MAX_ROWS // 32):
            index = lane + 32 * half
            there = index < requests
            index = cutlass.select_(there, index, requests - 1)
            begin, end = row_start[index], row_start[index + 1]
            # Of a request without a slot the keys are 0 whatever else is.
            width = cutlass.select_(slots[index] > 0, end - begin, Int32(0))
            held.append((begin, width, history[index]))
            before = before + cute.arch.popc(
                cute.arch.vote_ballot_sync(there & (end <= row))
            )
        begin, width, past = (
            cutlass.select_(
                before < 32,
                cute.arch.shuffle_sync(low, before & 31),
                cute.arch.shuffle_sync(high, before & 31),
            )
            for low, high in zip(*held, strict=True)
        )
        past = past - cutlass.select_(counted != 0, width, Int32(0))
        seen = cutlass.select_(causal != 0, row - begin + 1, width)
        live = (before < requests) & (width > 0)
        return cutlass.select_(live, past + seen, Int32(0))
