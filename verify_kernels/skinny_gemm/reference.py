# SPDX-License-Identifier: Apache-2.0
"""Y[M, N] = X[M, K] W[N, K]^T in plain torch, fp32 or fp64, any device."""

from __future__ import annotations

import torch
from torch import Tensor


def skinny_gemm(x: Tensor, w: Tensor, compute: torch.dtype = torch.float64) -> Tensor:
    """[M, N] in ``compute``, unrounded. Each row alone, in shapes that M does not set.

    Args:
        x: [M, K], any dtype.
        w: [N, K], any dtype.
        compute: dtype of products and sums.
    """
    weights = w.to(compute)
    out = x.new_empty((x.shape[0], w.shape[0]), dtype=compute)
    for t in range(x.shape[0]):
        out[t] = (weights * x[t].to(compute)).sum(-1)
    return out
