# SPDX-License-Identifier: Apache-2.0
"""Kimi K3's latent mixture of experts in plain torch, fp32 or fp64, row by row.

With x the normed hidden row and z = W_latent_down x:

    s = sigmoid(W_router x);  the top k experts by s + bias;  w_e = s_e / sum(s) * scale
    y = W_latent_up RMSNorm(sum_e w_e W2_e SiTU(W1_e z, W3_e z)) + Shared(x)

The bias chooses and does not weigh. Equal scores go to the lower expert id. The sum
over experts runs in ascending expert id here, whatever order the router lists them in;
the kernels add in the order of the row's choices, which `route` makes of its scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.dense.reference import MlpWeights, mlp, mlp_row, project, rms_norm
from verify_kernels.moe.mxfp4 import Mxfp4, dequantise


@dataclass(frozen=True)
class MoeWeights:
    """E experts of inner width I on a latent of width L; hidden width H.

    router [E, H], bias [E]; latent_down [L, H], latent_norm [L], latent_up [H, L];
    w1 (gate) and w3 (up) MXFP4 [E, I, L], w2 (down) MXFP4 [E, L, I]; shared, an MLP
    H -> H.
    """

    router: Tensor
    bias: Tensor
    latent_down: Tensor
    latent_norm: Tensor
    latent_up: Tensor
    w1: Mxfp4
    w3: Mxfp4
    w2: Mxfp4
    shared: MlpWeights
    top_k: int = 16
    routed_scale: float = 1.0
    norm_eps: float = 1e-5


def route(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    routed_scale: float = 1.0,
    *,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Router logits [M, E] and bias [E] to expert ids int64 [M, k], weights [M, k].

    Experts come in falling order of sigmoid(logit) + bias; NaN is the largest. Weights
    are in ``compute`` and add up to ``routed_scale``.

    Raises:
        ValueError: if the shapes do not fit or top_k is not 1 to E.
    """
    if logits.ndim != 2 or bias.shape != (logits.shape[1],):
        raise ValueError(
            f"logits is {tuple(logits.shape)} and bias {tuple(bias.shape)}; they must "
            "be [M, E] and [E]"
        )
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {logits.shape[1]}")
    shape = (logits.shape[0], top_k)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=compute, device=logits.device)
    choice = bias.to(compute)
    for m in range(shape[0]):
        scores = torch.sigmoid(logits[m].to(compute))
        # A stable sort keeps equal scores in the order of their ids; topk does not.
        order = torch.sort(scores + choice, descending=True, stable=True).indices
        ids[m] = order[:top_k]
        picked = scores[ids[m]]
        weights[m] = picked / picked.sum() * routed_scale
    return ids, weights


def expert_plan(
    ids: Tensor, num_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids [M, K], distinct in a row, to which experts are needed and by which rows.

    Rows of -1 are padding and need none; L are not. A pair is row * K + slot. Returns
    int32, with D distinct experts: experts [E] in ascending order, -1 from D on;
    offsets [E + 1], where each one's pairs begin, L K from D on; pairs [max_rows K]
    grouped by expert, rows ascending, -1 from L K on; counts [2], D and L K.
    """
    top_k = ids.shape[1]
    users: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            users.setdefault(expert, []).append(pair)
    used = sorted(users)
    pairs = [pair for expert in used for pair in users[expert]]
    starts = [0]
    for expert in used:
        starts.append(starts[-1] + len(users[expert]))

    def words(values: list[int], count: int, rest: int) -> Tensor:
        padded = values + [rest] * (count - len(values))
        return torch.tensor(padded, dtype=torch.int32, device=ids.device)

    return (
        words(used, num_experts, -1),
        words(starts, num_experts + 1, len(pairs)),
        words(pairs, max_rows * top_k, -1),
        words([len(used), len(pairs)], 2, 0),
    )


def dense_experts(
    w1: Mxfp4,
    w3: Mxfp4,
    w2: Mxfp4,
    used: Iterable[int],
    *,
    compute: torch.dtype = torch.float64,
) -> dict[int, MlpWeights]:
    """The experts ``used``, dequantised: id to (gate, up, down)."""
    return {
        e: MlpWeights(*(dequantise(w[e], compute) for w in (w1, w3, w2))) for e in used
    }


def experts(
    latent: Tensor,
    ids: Tensor,
    weights: Tensor,
    bank: Mapping[int, MlpWeights],
    *,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """Weighted sum of the routed experts: latent [M, L] -> [M, L] in ``compute``.

    ids int64 [M, k], distinct in a row, and weights [M, k] as `route` gives them;
    ``bank`` as `dense_experts` gives it, with every expert that ids names.
    """
    out = torch.empty(latent.shape, dtype=compute, device=latent.device)
    for m in range(latent.shape[0]):
        row = latent[m].to(compute)
        share = dict(zip(ids[m].tolist(), weights[m].to(compute).unbind(), strict=True))
        total = torch.zeros_like(row)
        for expert in sorted(share):
            total = total + share[expert] * mlp_row(row, bank[expert])
        out[m] = total
    return out


def moe(
    x: Tensor,
    weights: MoeWeights,
    *,
    compute: torch.dtype = torch.float64,
    bank: Mapping[int, MlpWeights] | None = None,
) -> Tensor:
    """The whole layer, x [M, H] -> [M, H] in ``compute``.

    ``bank`` holds all experts dequantised, for callers that run many steps; without
    it those that the rows use are dequantised here.

    Raises:
        ValueError: if x does not have the router's width.
    """
    w = weights
    logits = project(x, w.router, compute=compute)
    ids, shares = route(logits, w.bias, w.top_k, w.routed_scale, compute=compute)
    if bank is None:
        used = ids.unique().tolist()
        bank = dense_experts(w.w1, w.w3, w.w2, used, compute=compute)
    latent = project(x, w.latent_down, compute=compute)
    routed = experts(latent, ids, shares, bank, compute=compute)
    norm = w.latent_norm.to(compute)
    for m in range(x.shape[0]):
        routed[m] = rms_norm(routed[m], norm, w.norm_eps)
    up = project(routed, w.latent_up, compute=compute)
    shared = mlp(x, w.shared, compute=compute)
    # One addition an element has one rounding, whatever the shape.
    return up + shared
