# SPDX-License-Identifier: Apache-2.0
"""KDA commit: the accepted rows of the last verify step folded into the state.

Per slot and head, with n = min(accepted, recorded) and the step's u, k, a = e^g:

    S <- S diag(a_t) + u_t k_t^T,   t = 0 .. n - 1
    window[0 .. 2] <- window[n .. n + 2],   recorded <- 0

by `KdaParts.fold_rows`, so the bits are those that the next step would have folded to.
In a rolling window the taps are one entry further back, so with n = 0 they stay; and
``accepted`` below 1 says that a prompt will start in the slot: nothing of it is kept.

A cluster of four CTAs owns one head of one slot, and a CTA 32 channels of it: that many
rows of the state S [V, K], two of them to sixteen lanes as in the verify kernel; rank 0
has the window and the counts besides.

    loads        16 bytes a lane, all under way as soon as slot and accepted are known:
                 four of the state; a warp a recorded row, its key, decay and the CTA's
                 part of u, into shared memory; the taps
    fold         in registers; the state is stored as it was loaded
    window       a thread has the same 16 bytes of the three entries, and all that it
                 overwrites it has read: no other thread is concerned
    counts       read by every CTA, so written after a cluster barrier

State and window are read once and written once, u is read once; keys and decays come
from memory once, and from L2 to each of the four CTAs. What lies past the recorded rows
may be loaded and is not used.

Early loads: none, earlier kernels write all of it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from verify_kernels.common import ptx
from verify_kernels.kda.parts import (
    COLUMNS,
    DIM,
    KIND_BYTES,
    LINE_BYTES,
    MAX_WIDTH,
    OLD_DECAY,
    OLD_KEY,
    OLD_U,
    PARTS,
    TAPS,
    THREADS,
    VECTOR_BYTES,
    KdaParts,
)

CTAS = 4
#: 64 registers a thread. Four CTAs have 64 KB of an SM under way; an SM's share of
#: 4.31 TB/s is 33 KB a microsecond.
CTAS_PER_SM = 4
#: Threads that move the window: 16 bytes of a head's q, k and v.
MOVERS = 3 * LINE_BYTES // 16


class KdaCommitKernel(KdaParts):
    """For any number of heads and slots; rolling as of `KdaKernel`."""

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    early_loads = ()
    parameters = (
        "slots",
        "accepted",
        "state",
        "window",
        "u",
        "key",
        "decay",
        "counts",
    )
    threads = THREADS

    def __init__(self, rolling: bool):
        super().__init__(CTAS, True, rolling)
        # Of the vectors only those of rows that wait.
        self.vectors_at = -OLD_U * KIND_BYTES
        self.shared_bytes = 3 * KIND_BYTES

    @cute.jit
    def __call__(
        self,
        slots: cute.Tensor,
        accepted: cute.Tensor,
        state: cute.Tensor,
        window: cute.Tensor,
        u: cute.Tensor,
        key: cute.Tensor,
        decay: cute.Tensor,
        counts: cute.Tensor,
        pdl: Int32,
        stream,
    ):
        self.kernel(slots, accepted, state, window, u, key, decay, counts).launch(
            grid=[CTAS, state.shape[1], slots.shape[0]],
            block=[THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=CTAS_PER_SM,
            # As the GEMMs around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        slots: cute.Tensor,
        accepted: cute.Tensor,
        state: cute.Tensor,
        window: cute.Tensor,
        u: cute.Tensor,
        key: cute.Tensor,
        decay: cute.Tensor,
        counts: cute.Tensor,
    ):
        rank, head, request = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = thread // 32
        part = lane % PARTS
        # The first of the E channels of this lane's sixteen.
        channel = rank * self.channels + self.each * (thread // PARTS)
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        slot = slots[request]
        told = accepted[request]
        # Without it the second is asked for when the first has come (SASS).
        cute.arch.sync_warp()
        if slot > 0:
            # Rows to fold, if there are so many.
            rows = cutlass.min(cutlass.max(told, Int32(0)), Int32(MAX_WIDTH))
            live = Int32(warp < rows)
            row_at = KIND_BYTES * Int64(head) + VECTOR_BYTES * warp
            whole = row_at + 16 * lane
            key_words = ptx.load_global_128_if(self.slot_of(key, slot) + whole, live)
            decay_at = self.slot_of(decay, slot) + whole
            decay_words = ptx.load_global_128_if(decay_at, live)
            own = Int32((warp < rows) & (lane < self.chunks))
            chunk = 16 * (self.chunks * rank + lane)
            u_words = ptx.load_global_128_if(
                self.slot_of(u, slot) + row_at + chunk, own
            )
            state_at = self.slot_of(state, slot) + 16 * part
            state_at = state_at + Int64(VECTOR_BYTES) * (head * DIM + channel)
            state_words = [
                ptx.load_global_128_if(
                    state_at, Int32(rows > 0), VECTOR_BYTES * (i // 2) + 256 * (i % 2)
                )
                for i in range(2 * self.each)
            ]
            moves = Int32((rank == 0) & (thread < MOVERS) & (rows > 0))
            pitch = Int64(2) * window.stride[1]
            window_at = window.iterator.toint() + Int64(2) * window.stride[0] * slot
            line = head + heads * (thread // 16)
            window_at = window_at + Int64(LINE_BYTES) * line + 16 * (thread % 16)
            taps = self.entries(window_at, pitch, rows - self.least, moves)

            recorded = counts[slot, head, 0]
            count = cutlass.min(rows, cutlass.max(recorded, Int32(0)))
            # More were told accepted than there were rows.
            if count < rows:
                first = self.first_tap(count)
                taps = self.entries(window_at, pitch, first, moves)

            place = base + self.vectors_at + VECTOR_BYTES * warp
            for kind, words in ((OLD_KEY, key_words), (OLD_DECAY, decay_words)):
                there = place + kind * KIND_BYTES + 16 * lane
                ptx.store_shared_128_if(there, live, words)
            ptx.store_shared_128_if(place + OLD_U * KIND_BYTES + chunk, own, u_words)
            cute.arch.sync_threads()
            # Relaxed: a branch was taken by the count, so it is in a register.
            cute.arch.cluster_arrive_relaxed()

            if count > 0:
                s = cute.make_rmem_tensor((self.each * COLUMNS,), Float32)
                for i in cutlass.range_constexpr(2 * self.each):
                    for j in cutlass.range_constexpr(4):
                        s[4 * i + j] = ptx.float_from_bits(state_words[i][j])
                columns = base + self.vectors_at + 16 * part
                changes = base + self.vectors_at + OLD_U * KIND_BYTES + 4 * channel
                self.fold_rows(s, columns, changes, count)
                self.store_state(state_at, s)
                if moves != 0:
                    for i in cutlass.range_constexpr(TAPS - 1):
                        ptx.store_global_128(window_at + pitch * i, taps[i])
            cute.arch.cluster_wait()
            if (thread == 0) & (rank == 0):
                counts[slot, head, 0] = Int32(0)
                if told > cutlass.max(recorded, Int32(self.least)):
                    counts[slot, head, 1] = counts[slot, head, 1] + 1
                if const_expr(self.rolling):
                    begins = told <= 0
                    if begins:
                        counts[slot, head, 1] = Int32(0)

    @cute.jit
    def entries(self, address, pitch, first, live):
        """16 bytes of three entries of the window from ``first`` on."""
        return [
            ptx.load_global_128_if(address + pitch * (first + i), live)
            for i in range(TAPS - 1)
        ]
