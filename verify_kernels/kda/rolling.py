# SPDX-License-Identifier: Apache-2.0
"""The fold in vLLM's slots in plain torch: the truth for `verify_kernels.kda.slots`.

It works in a `KdaFoldState` whose window rolls, the rows by
`verify_kernels.kda.reference.step`, so its bits are those of the other layouts in the
cache's precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.batch import MAX_WIDTH, VerifyBatch
from verify_kernels.kda.host import KdaFoldState
from verify_kernels.kda.reference import TAPS, KdaRows, KdaWeights, step

PAST = TAPS - 1


def commit(cache: KdaFoldState, slot: int, accepted: int) -> None:
    """Fold the accepted rows of ``slot`` into its state, and bring its taps to the
    window's begin; below 1 a request begins there, and nothing is kept."""
    if accepted < 1:
        cache.counts[slot] = 0
        return
    recorded = max(int(cache.counts[slot, 0, 0]), 0)
    count = min(accepted, recorded, MAX_WIDTH)
    if accepted > max(recorded, 1):
        cache.counts[slot, :, 1] += 1
    state = cache.state[slot]
    for t in range(count):
        u, key, decay = (x[slot, :, t] for x in (cache.u, cache.key, cache.decay))
        state = state * decay[:, None, :] + u[:, :, None] * key[:, None, :]
    cache.state[slot] = state
    if count:
        cache.window[slot, :PAST] = cache.window[
            slot, count - 1 : count - 1 + PAST
        ].clone()
    cache.counts[slot, :, 0] = 0


def verify(
    batch: VerifyBatch, rows: KdaRows, weights: KdaWeights, cache: KdaFoldState
) -> Tensor:
    """Gated, normed outputs [M, H, V] of every row; padding rows and slots <= 0 give 0.

    ``batch.state_slots`` are the slots, ``batch.accepted`` counts rows of a request's
    last step, 1 after a prompt. A request of width 0 is padding.
    """
    out = torch.zeros_like(rows.v)
    starts, accepted = batch.row_start.tolist(), batch.accepted.tolist()
    for b, slot in enumerate(batch.state_slots.tolist()):
        begin, end = starts[b], starts[b + 1]
        if slot <= 0 or begin == end:
            continue
        commit(cache, slot, max(accepted[b], 1))
        own = torch.stack([x[begin:end] for x in (rows.q, rows.k, rows.v)], 1)
        past = cache.window[slot, :PAST].unflatten(-1, own.shape[1:])
        line = torch.cat((past.to(own.dtype), own))
        state = cache.state[slot]
        for t in range(end - begin):
            taps = line[t : t + TAPS].unbind(1)
            result = step(state, taps, rows, begin + t, weights)
            out[begin + t], state = result.out, result.state
            cache.u[slot, :, t] = result.u
            cache.key[slot, :, t] = result.key
            cache.decay[slot, :, t] = result.g.exp()
        size = PAST - 1 + end - begin
        cache.window[slot, :size] = line[1:].flatten(1).to(cache.window.dtype)
        cache.counts[slot, :, 0] = end - begin
    return out
