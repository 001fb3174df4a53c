# SPDX-License-Identifier: Apache-2.0
"""Projections, RMSNorm and the SiTU MLP in plain torch, row by row.

    SiTU(gate, up) = beta tanh(gate / beta) sigmoid(gate) * lin tanh(up / lin)
    MLP(x) = W_down SiTU(W_gate x, W_up x)

with beta = 4 and lin = 25 in Kimi K3 (``situ`` in its ``config.json``), for experts,
shared experts and dense layers alike; |SiTU| <= beta * lin.

Every function takes rows [M, ...] of any floating dtype and computes in ``compute``.
It works one row at a time on tensors of one fixed shape: torch's batched matmuls and
even its elementwise operations change a row's last bit with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SITU_BETA = 4.0
SITU_LINEAR_BETA = 25.0


@dataclass(frozen=True)
class MlpWeights:
    """gate, up [I, H]; down [O, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


def matvec(weight: Tensor, row: Tensor) -> Tensor:
    """[N, K] times [K]: a product and a sum, with N * K elements of scratch.

    Not a BLAS call: MKL's matrix-vector product changed bits with the alignment of
    either operand in memory (fp32 and fp64, K = 37 to 7168).
    """
    return (weight * row).sum(-1)


def rms_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """row / sqrt(mean(row^2) + eps) * weight, over the last dimension of one row."""
    return row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps) * weight


def situ(
    gate: Tensor,
    up: Tensor,
    beta: float = SITU_BETA,
    linear_beta: float = SITU_LINEAR_BETA,
) -> Tensor:
    """SiTU of two tensors of one shape."""
    bent = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return bent * (linear_beta * torch.tanh(up / linear_beta))


def project(
    x: Tensor, weight: Tensor, *, compute: torch.dtype = torch.float64
) -> Tensor:
    """Y[M, N] = X[M, K] W[N, K]^T in ``compute``.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; they must "
            "[M, K] and [N, K]"
        )
    matrix = weight.to(compute)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=compute, device=x.device)
    for m in range(x.shape[0]):
        out[m] = matvec(matrix, x[m].to(compute))
    return out


def mlp_row(row: Tensor, weights: MlpWeights) -> Tensor:
    """The MLP of one row [H] -> [O], all tensors of one dtype."""
    inner = situ(matvec(weights.gate, row), matvec(weights.up, row))
    return matvec(weights.down, inner)


def mlp(
    x: Tensor, weights: MlpWeights, *, compute: torch.dtype = torch.float64
) -> Tensor:
    """[M, H] -> [M, O] in ``compute``.

    Raises:
        ValueError: if the shapes do not fit.
    """
    inner, hidden = weights.gate.shape
    if (
        x.ndim != 2
        or x.shape[1] != hidden
        or weights.up.shape != weights.gate.shape
        or weights.down.shape[1] != inner
    ):
        raise ValueError(
            f"x is {tuple(x.shape)}, gate {tuple(weights.gate.shape)}, up "
            f"{tuple(weights.up.shape)}, down {tuple(weights.down.shape)}; they must "
            "be [M, H], [I, H], [I, H] and [O, I]"
        )
    cast = MlpWeights(
        weights.gate.to(compute), weights.up.to(compute), weights.down.to(compute)
    )
    out = torch.empty(x.shape[0], cast.down.shape[0], dtype=compute, device=x.device)
    for m in range(x.shape[0]):
        out[m] = mlp_row(x[m].to(compute), cast)
    return out
