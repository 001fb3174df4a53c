# SPDX-License-Identifier: Apache-2.0
"""Ways of this package to run a KDA step; results are bf16 [M, H, 128]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.bench.candidate import OURS, Mode, reason
from experiments.bench.kda_data import FOLD, KdaData, KdaShape
from experiments.bench.ways import Run, Way, Ways
from verify_kernels.kda.host import DIM


def new_out(shape: KdaShape, device: torch.device) -> Tensor:
    """A result's buffer, full of NaN."""
    size = (shape.rows, shape.heads, DIM)
    return torch.full(size, torch.nan, dtype=torch.bfloat16, device=device)


def ours(layout: str, modes: Sequence[Mode]) -> Ways[KdaData]:
    """``verify_kernels.kda`` in one layout."""
    try:
        from verify_kernels.kda import kda_verify, kda_verify_snapshots
    except ImportError as error:
        return Ways(missing={OURS: reason(error)})

    def maker(pdl: bool) -> Callable[[KdaData], Run]:
        def make(data: KdaData) -> Run:
            out = new_out(data.shape, data.packed.device)

            def fold(copy: int) -> Tensor:
                return kda_verify(
                    data.packed,
                    data.weights[copy],
                    data.fold,
                    data.fold_batches[copy],
                    out,
                    pdl=pdl,
                )

            def snapshots(copy: int) -> Tensor:
                return kda_verify_snapshots(
                    data.packed,
                    data.weights[copy],
                    data.state,
                    data.window,
                    data.tables[copy],
                    data.batches[copy],
                    out,
                    pdl=pdl,
                )

            return fold if layout == FOLD else snapshots

        return make

    return Ways([Way(layout, mode, maker(mode == "pdl")) for mode in modes])
