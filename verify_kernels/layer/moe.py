# SPDX-License-Identifier: Apache-2.0
"""K3's latent MoE from the normed rows on: its projections, and when they run.

    logits = x W_r^T                                     fp32
    latent = x W_d^T
    routed = W_u (the chosen experts of latent)          by the caller
    shared = W_sd act(x W_gu^T)

The rows are routed + shared, which the mix that follows adds.

Routing is long for what it does and leaves the memory idle. With more than `FRONT_ROWS`
it runs behind the router on the main stream, and beside it, on the other, the latent
down-projection and then the shared expert. With fewer the router and both projections
are one launch, and only what is left of the shared expert runs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.layer.products import Product, Products
from verify_kernels.layer.side import Side
from verify_kernels.skinny_gemm import serves

#: Rows up to which what reads the layer's input is one launch. KDA layers in chains,
#: one launch and the two streams (H200, 2026-12-01): TP 16, one row 73.9 and 78.7 us,
#: two 90.1 and 96.3, four 105.0 and 99.6, eight 129.8 and 122.1; TP 8 102 and 109, 116
#: and 131, 146 and 149, 191 and 187; TP 1 412 and 412, 484 and 495, 648 and 639.
FRONT_ROWS = 2
_FRONT = (torch.float32, torch.bfloat16, torch.bfloat16)


@dataclass(frozen=True)
class MoeWeights:
    """A rank's projections, bf16 [N, K].

    Attributes:
        router: [E, H].
        down: [L, H], to the experts' width.
        gate_up: [2 I, H], of the shared expert.
        shared_down: [H, I].
        up: [H, L].
    """

    router: Tensor
    down: Tensor
    gate_up: Tensor
    shared_down: Tensor
    up: Tensor


#: This rank's rows [M, L] of the chosen experts from latent bf16 [M, L], logits fp32
#: [M, E] and what must be called before anything reads latent.
Routed = Callable[[Tensor, Tensor, Callable[[], None]], Tensor]


class LatentMoe:
    """The sublayer on one rank.

    Args:
        weights: they stay where they are.
        activation: of the shared expert, [M, 2 I] to [M, I].
        routed: the experts.
        summed: makes of what they give, [M, L], what the up-projection takes: the sum
            over ranks and the norm, where ``routed`` has not got them.
        side: the other stream.
        pdl: launch as programmatic dependents.
        front_rows: M up to which there is one front launch; only where it has a kernel.

    Raises:
        ValueError: no kernel is compiled for a projection.
    """

    def __init__(
        self,
        weights: MoeWeights,
        *,
        activation: Callable[[Tensor], Tensor],
        routed: Routed,
        summed: Callable[[Tensor], Tensor] = lambda rows: rows,
        side: Side,
        pdl: bool,
        front_rows: int = FRONT_ROWS,
    ) -> None:
        self._front: Products | None = None
        if serves(weights.router.shape[1], _FRONT):
            parts = (weights.router, weights.down, weights.gate_up)
            self._front = Products(parts, _FRONT, pdl=pdl)
        self._router = Product(weights.router, torch.float32, pdl=pdl)
        self._down = Product(weights.down, pdl=pdl)
        self._gate_up = Product(weights.gate_up, pdl=pdl)
        self._shared_down = Product(weights.shared_down, pdl=pdl)
        self._up = Product(weights.up, pdl=pdl)
        self._activation = activation
        self._routed = routed
        self._summed = summed
        self._side = side
        self._front_rows = front_rows

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The routed and this rank's shared rows, bf16 [M, H], of bf16 [M, H]."""
        side = self._side
        if self._front is not None and hidden.shape[0] <= self._front_rows:
            logits, latent, gate_up = self._front(hidden)
            side.begin()
            with side:
                shared = self._shared_down(self._activation(gate_up))
            routed = self._routed(latent, logits, lambda: None)
        else:
            side.begin()
            logits = self._router(hidden)
            with side:
                latent = self._down(hidden)
                side.mark()
                shared = self._shared_down(self._activation(self._gate_up(hidden)))
            routed = self._routed(latent, logits, side.wait_for_mark)
        # Here and not behind the up-projection: that changes nothing with up to 8 rows,
        # and a layer with 64 takes 1.5 % longer (H200, 2026-12-01).
        side.join()
        return self._up(self._summed(routed)), shared
