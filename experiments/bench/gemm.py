# SPDX-License-Identifier: Apache-2.0
"""skinny_gemm against cuBLAS and vLLM on one projection."""

from __future__ import annotations

from collections.abc import Callable

from experiments.bench import ours, peers
from experiments.bench.candidate import Mode, Offer
from experiments.bench.core import Settings
from experiments.bench.product import ProductBench
from experiments.bench.shapes import Projection

OP = "skinny_gemm"


class GemmBench(ProductBench):
    """See :class:`experiments.bench.core.Bench`.

    Args:
        shape: the projection.
        settings: of the run.
        our_offer, peer_offer: where the candidates come from.
    """

    def __init__(
        self,
        shape: Projection,
        settings: Settings,
        our_offer: Callable[[Projection, tuple[Mode, ...]], Offer] = ours.skinny_gemm,
        peer_offer: Callable[[Projection, int, tuple[Mode, ...]], Offer] = peers.gemm,
    ) -> None:
        super().__init__(
            OP,
            shape.label,
            shape.described(),
            (shape,),
            settings,
            lambda: our_offer(shape, settings.modes),
            lambda rows: peer_offer(shape, rows, settings.modes),
        )
