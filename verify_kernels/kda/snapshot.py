# SPDX-License-Identifier: Apache-2.0
"""KDA verify in vLLM's own slot scheme: one snapshot of the state for every row.

A request owns the slots s_0 .. s_7, a line of a table [B, 8]. A verify step of q rows
writes the state after row t to s_t, and nothing is committed: the next step, told that
a of those rows were accepted, starts from s_{a-1} and overwrites what was rejected.

The convolution window lives in s_0 alone, as c[0 .. 9], room for 3 taps and 7 drafts.
The next row's past taps are c[a-1 .. a+1]; a step of rows x leaves c = [c[a], c[a+1],
x_0 .. x_{q-1}] (raw projections) and entries past those stale. This is the rolling of
vLLM's ``causal_conv1d_update`` and ``fused_recurrent_kda``, whose packed window holds
q, k and v in one tensor.

Every row moves a whole state (1 read and q writes a step); the layout is here for
drop-in use. Its numbers are bit for bit those of `verify_kernels.kda.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.batch import MAX_WIDTH, VerifyBatch
from verify_kernels.kda.reference import (
    TAPS,
    KdaRows,
    KdaState,
    KdaWeights,
    step,
)

PAST = TAPS - 1
WINDOW = PAST + MAX_WIDTH - 1


@dataclass
class KdaSnapshots:
    """state [slots, H, V, K]; window_q, window_k [slots, 10, H, K], window_v
    [slots, 10, H, V]; width [slots], rows of the request's last step, kept at its s_0.

    clamped counts accepted counts outside 1 .. width. Zero is among them: row 0 may
    have overwritten the snapshot before it, so this layout cannot undo a whole step.
    """

    state: Tensor
    window_q: Tensor
    window_k: Tensor
    window_v: Tensor
    width: Tensor
    clamped: int = 0

    @classmethod
    def allocate(
        cls,
        slots: int,
        heads: int,
        k: int,
        v: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KdaSnapshots:
        """All NaN, so that a read before a write shows; `place` starts a request."""

        def poison(*shape: int) -> Tensor:
            size = (slots, *shape)
            return torch.full(size, torch.nan, dtype=dtype, device=device)

        return cls(
            state=poison(heads, v, k),
            window_q=poison(WINDOW, heads, k),
            window_k=poison(WINDOW, heads, k),
            window_v=poison(WINDOW, heads, v),
            width=torch.zeros(slots, dtype=torch.int64, device=device),
        )

    def place(self, slot: int, committed: KdaState, source: int) -> None:
        """Start a request at s_0 = ``slot`` from committed state, as prefill leaves it.

        Its first step is told accepted = 1. ValueError if ``source`` has rows waiting.
        """
        if committed.width[source]:
            raise ValueError(
                f"source slot {source} holds {int(committed.width[source])} "
                "uncommitted rows; call commit first"
            )
        self.state[slot] = committed.state[source]
        self.window_q[slot, :PAST] = committed.window_q[source]
        self.window_k[slot, :PAST] = committed.window_k[source]
        self.window_v[slot, :PAST] = committed.window_v[source]
        self.width[slot] = 1

    def committed(
        self, slots: list[int], accepted: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """State [H, V, K] and windows q, k [3, H, K], v [3, H, V] after ``accepted``
        rows of the last step; views. ``slots`` is the request's line of the table."""
        taps = slice(accepted - 1, accepted - 1 + PAST)
        return (
            self.state[slots[accepted - 1]],
            self.window_q[slots[0], taps],
            self.window_k[slots[0], taps],
            self.window_v[slots[0], taps],
        )


def verify(
    batch: VerifyBatch,
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaSnapshots,
    slots: Tensor,
) -> Tensor:
    """Gated, normed outputs [M, H, V] of every row; padding rows and slots <= 0 give 0.

    slots int32 [B, 8]: row b's s_0 .. s_7, with s_0 = ``batch.state_slots[b]``; entries
    past the request's width in this step and in its last are not read.
    ``batch.accepted`` counts accepted rows of each request's previous step, 1 after
    `KdaSnapshots.place`; a count outside 1 .. that step's width is clamped into it, and
    counted. A request of width 0 is padding: nothing of it is read, so pass its count
    again with its next rows. ValueError, and nothing written, if the table is wrong.
    """
    batch.check()
    table = _table(batch, cache, slots)
    starts, accepted = batch.row_start.tolist(), batch.accepted.tolist()
    out = torch.zeros_like(rows.v)
    for b, line in table.items():
        begin, end = starts[b], starts[b + 1]
        last = int(cache.width[line[0]])
        count = min(max(accepted[b], 1), last)
        cache.clamped += count != accepted[b]
        state, *windows = cache.committed(line, count)
        line_q, line_k, line_v = (
            torch.cat((past, own[begin:end]))
            for past, own in zip(windows, (rows.q, rows.k, rows.v), strict=True)
        )
        for t in range(end - begin):
            own = slice(t, t + TAPS)
            taps = (line_q[own], line_k[own], line_v[own])
            result = step(state, taps, rows, begin + t, weights)
            out[begin + t], state = result.out, result.state
            cache.state[line[t]] = state
        size = PAST - 1 + end - begin
        cache.window_q[line[0], :size] = line_q[1:]
        cache.window_k[line[0], :size] = line_k[1:]
        cache.window_v[line[0], :size] = line_v[1:]
        cache.width[line[0]] = end - begin
    return out


def _table(
    batch: VerifyBatch, cache: KdaSnapshots, slots: Tensor
) -> dict[int, list[int]]:
    """The slots each live request writes or reads, checked."""
    if slots.dtype != torch.int32 or tuple(slots.shape) != (batch.size, MAX_WIDTH):
        raise ValueError(
            f"slots is {slots.dtype} {tuple(slots.shape)}; it must be int32 "
            f"[{batch.size}, {MAX_WIDTH}]"
        )
    starts, first = batch.row_start.tolist(), batch.state_slots.tolist()
    total = cache.state.shape[0]
    table: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    for b, line in enumerate(slots.tolist()):
        width = starts[b + 1] - starts[b]
        if first[b] <= 0 or width == 0:
            continue
        if line[0] != first[b]:
            raise ValueError(
                f"slots[{b}, 0] is {line[0]} and state_slots[{b}] is {first[b]}; they "
                "must be the same slot"
            )
        last = int(cache.width[line[0]]) if line[0] < total else 0
        used = line[: max(width, last)]
        if any(not 0 < slot < total for slot in used) or len(set(used)) < len(used):
            raise ValueError(
                f"slots[{b}] begins {used}; a request's slots must be distinct and in "
                f"1 .. {total - 1}"
            )
        if last == 0:
            raise ValueError(
                f"slot {line[0]} of request {b} holds no state; call place first"
            )
        for slot in used:
            if owner.setdefault(slot, b) != b:
                raise ValueError(
                    f"slots name slot {slot} for requests {owner[slot]} and {b}"
                )
        table[b] = line
    return table
