# SPDX-License-Identifier: Apache-2.0
"""The fold layout in vLLM's caches: one slot a request, and vLLM's convolution window.

`KdaFoldState` holds it, with another window, bf16 [slots, W, 3 H 128], W at least 2 and
the rows of the widest step, which rolls as vLLM's does: the taps before the next row
are c[a - 1 .. a + 1] with a = accepted, 1 after a prompt, and a step of rows x leaves
[c[a], c[a + 1], x_0 .. x_{q-1}]. So a prompt that vLLM's kernels ran and our steps
share a slot. Of the accepted rows those are folded that are recorded: none after a
prompt, though one is reported then. A count below 1 is taken for 1, and what exceeds
both 1 and the recorded rows is counted in ``counts[slot, head, 1]``.

Before vLLM's kernels run a prompt's rows in a slot, `BoundSlots.commit` must have been
called for it. Bits are those of the fold layout. `verify_kernels.kda.rolling` is the
same in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from verify_kernels.batch import MAX_WIDTH
from verify_kernels.common.checks import check_all
from verify_kernels.kda.eager import compiled_commit
from verify_kernels.kda.host import (
    DIM,
    TAPS,
    KdaFoldState,
    KdaVerifyWeights,
    by_requests,
    cache_arguments,
    record_arguments,
    weight_arguments,
)


class BoundSlots:
    """Verify steps and commits of a layer; made by `bind_slots`.

    It holds the weights' memory, so a parameter that is given other memory must be
    bound again. The cache comes with each call. May be captured in a graph.
    """

    __slots__ = ("_commit", "_kernels", "_numbers", "_pdl", "_weights")

    def __init__(
        self,
        kernels: Sequence[Callable[..., None]],
        commit: Callable[..., None],
        weights: KdaVerifyWeights,
        pdl: bool,
    ) -> None:
        """``kernels`` by the number of requests; more than all take the last one."""
        w = weights
        self._kernels = kernels
        self._commit = commit
        self._weights = (w.w_fb, w.conv, w.a_log, w.dt_bias, w.norm)
        self._numbers = (w.lower_bound, w.norm_eps)
        self._pdl = int(pdl)

    def __call__(
        self,
        packed: Tensor,
        cache: KdaFoldState,
        slots: Tensor,
        row_start: Tensor,
        accepted: Tensor,
        out: Tensor,
    ) -> None:
        """Launch on the current stream: fold what was accepted, run these rows.

        Args:
            packed: bf16 [M, P] as of `verify_kernels.kda.kda_verify`, any M from 1 on.
            cache: of the layout that was checked; updated in place.
            slots: int32 [B, S], of which column 0 is read, rows at any stride; B from 1
                to 65,535. No two requests may have one live slot; <= 0 is none.
            row_start, accepted: as of `verify_kernels.batch.VerifyBatch`; a request has
                at most 8 rows and W - 2.
            out: bf16 [M, H, 128]; rows that ``row_start`` does not name stay.

        Raises:
            ValueError: by the compiled function, for other dtypes and extents; nothing
                is written then. That ``packed`` and ``out`` have the rows that
                ``row_start`` names, nobody checks.
        """
        kernel = self._kernels[min(slots.shape[0], len(self._kernels) - 1)]
        kernel(
            packed,
            *self._weights,
            row_start,
            slots,
            accepted,
            cache.state,
            cache.window,
            cache.u,
            cache.key,
            cache.decay,
            cache.counts,
            out,
            *self._numbers,
            1,
            self._pdl,
        )

    def commit(self, cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        """Launch on the current stream: leave committed state in slots.

        As `verify_kernels.kda.kda_commit`: afterwards state and window are those of a
        sequence that ends with the last accepted row, as a prompt leaves them, and no
        row is recorded. A count below 1 forgets all rows and clears the count of
        overruns: for a slot, whatever it holds, in which a new request begins.

        Args:
            cache: as of a call.
            slots: int32 [B], contiguous, B from 1 to 65,535; <= 0 is none.
            accepted: int32 [B], contiguous.
        """
        self._commit(
            slots,
            accepted,
            cache.state,
            cache.window,
            cache.u,
            cache.key,
            cache.decay,
            cache.counts,
            self._pdl,
        )


def bind_slots(
    weights: KdaVerifyWeights,
    cache: KdaFoldState,
    rows: int,
    *,
    ctas: int | None = None,
    pdl: bool = True,
) -> BoundSlots:
    """The launches of a layer: what stays is checked and compiled here.

    Args:
        weights, ctas, pdl: as of `verify_kernels.kda.kda_verify`.
        cache: on the device that launches are for; checked and not held.
        rows: of the widest step, 1 to 8.

    Raises:
        ValueError: for a dtype, shape, stride or device that does not fit, other
            ``rows``, or a cluster size that is not compiled.
    """
    if not 1 <= rows <= MAX_WIDTH:
        raise ValueError(
            f"rows is {rows}; a slot records 1 to {MAX_WIDTH} rows of a step"
        )
    state, window = cache.state, cache.window
    heads = state.shape[1] if state.dim() == 4 else 0
    entries = rows + TAPS - 2
    if not heads or window.dim() != 3 or window.shape[1] < entries:
        raise ValueError(
            f"state is {tuple(state.shape)} and window {tuple(window.shape)}; they "
            f"must be [slots, H, {DIM}, {DIM}] and [slots, W, 3 H {DIM}] with W at "
            f"least {entries}"
        )
    arguments: list[Any] = [
        *cache_arguments(state, window),
        *record_arguments(cache),
        *weight_arguments(weights, heads),
    ]
    check_all(arguments, state.device, "state")
    kernels = by_requests(state, ctas, "slot", "verify_kernels.kda.rolling")
    commit = compiled_commit(state.device.index, True)
    return BoundSlots(kernels, commit, weights, pdl)
