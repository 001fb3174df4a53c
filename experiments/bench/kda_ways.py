# SPDX-License-Identifier: Apache-2.0
"""Ways to run a KDA step, and those of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.bench.candidate import OURS, Key, Mode, reason
from experiments.bench.kda_data import FOLD, KdaData, KdaShape
from verify_kernels.kda.host import DIM

#: Runs the step on a copy of the data; the result is bf16 [M, H, 128].
Run = Callable[[int], Tensor]


@dataclass(frozen=True)
class Way:
    """One way to run the step.

    Attributes:
        name: the layout if it is ours, else the peer's name.
        mode: how its kernels are launched.
        make: prepares it for some data; what it returns reads packed rows and accepted
            counts anew each time, and its result is overwritten by its next run.
        note: what a reader should know.
    """

    name: str
    mode: Mode
    make: Callable[[KdaData], Run]
    note: str = ""

    @property
    def key(self) -> Key:
        """(name, mode)."""
        return self.name, self.mode


@dataclass(frozen=True)
class Ways:
    """Ways of one source, and those it cannot offer with the reason."""

    ways: list[Way] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Ways) -> Ways:
        return Ways(self.ways + other.ways, {**self.missing, **other.missing})


def new_out(shape: KdaShape, device: torch.device) -> Tensor:
    """A result's buffer, full of NaN."""
    size = (shape.rows, shape.heads, DIM)
    return torch.full(size, torch.nan, dtype=torch.bfloat16, device=device)


def ours(layout: str, modes: Sequence[Mode]) -> Ways:
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
