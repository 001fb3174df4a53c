# SPDX-License-Identifier: Apache-2.0
"""Products with weights that stay, into new tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify_kernels.skinny_gemm import SkinnyGemm


class Product:
    """Y = X W^T.

    Args:
        weight: bf16 [N, K], contiguous.
        dtype: Y's, bf16 or fp32.
        pdl: launch as a programmatic dependent.

    Raises:
        ValueError: no kernel is compiled for this K and dtype, or the weight does not
            fit it.
    """

    def __init__(
        self, weight: Tensor, dtype: torch.dtype = torch.bfloat16, *, pdl: bool
    ) -> None:
        self._width, columns = weight.shape
        self._dtype = dtype
        self._launch = SkinnyGemm(columns, out_dtype=dtype, pdl=pdl).bind(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """A new [M, N] of bf16 rows [M, K]."""
        out = x.new_empty((x.shape[0], self._width), dtype=self._dtype)
        self._launch(x, out)
        return out


class Products:
    """Y_i = X W_i^T in one launch.

    Args:
        weights: bf16 [N_i, K], contiguous.
        dtypes: of the Y_i.
        pdl: launch as a programmatic dependent.

    Raises:
        ValueError: as `Product`.
    """

    def __init__(
        self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], *, pdl: bool
    ) -> None:
        widths = [weight.shape[0] for weight in weights]
        self._outputs = list(zip(widths, dtypes, strict=True))
        columns = weights[0].shape[1]
        gemm = SkinnyGemm(columns, out_dtype=tuple(dtypes), pdl=pdl)
        self._launch = gemm.bind(list(weights))

    def __call__(self, x: Tensor) -> list[Tensor]:
        """New [M, N_i] of bf16 rows [M, K]."""
        outs = [
            x.new_empty((x.shape[0], width), dtype=dtype)
            for width, dtype in self._outputs
        ]
        self._launch(x, outs)
        return outs
