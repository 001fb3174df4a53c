# SPDX-License-Identifier: Apache-2.0
"""Attention residuals in plain torch: the truth for the kernel, fp32 or fp64.

A token carries a prefix p and up to eight saved blocks b_0 .. b_7 (the sums of all
sublayer outputs of earlier groups of layers). Before each sublayer the sources
v_i = b_0 .. b_{N-1}, p are mixed:

    s_i = <norm_weight * query_weight, v_i> / sqrt(mean(v_i^2) + eps)
    h   = sum_i softmax(s)_i v_i;      hidden = RMSNorm(h; output_norm_weight)

without a 1/sqrt(H) or a temperature. With N = 0, h is p, exactly. Before the mix
p <- round(p + delta), delta the previous sublayer's output, or round(delta + extra)
where that comes in two; the MLP of a layer that starts a block restarts it, p <- delta.
(Semantics of vLLM 0.33's Kimi K3 model.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def _mix(sources: Tensor, score_weight: Tensor, eps: float) -> Tensor:
    """[N + 1, H] -> [H] for one row."""
    spread = torch.rsqrt(sources.pow(2).mean(-1) + eps)
    shares = torch.softmax((sources * score_weight).sum(-1) * spread, 0)
    return (shares[:, None] * sources).sum(0)


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor,
    query_weight: Tensor,
    output_norm_weight: Tensor | None,
    *,
    extra: Tensor | None = None,
    num_blocks: int,
    write_block: int | None = None,
    restart: bool = False,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    round_prefix: torch.dtype | None = torch.bfloat16,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Update the prefix, save it as a block if asked, mix, and norm.

    Rows are independent and each is computed alone, so their bits do not depend on M.

    Args:
        prefix: [M, H]; not changed.
        delta: [M, H], the output of the sublayer before, or None to add nothing.
        blocks: [M, 8, H] (any number of blocks); blocks 0 .. num_blocks - 1 are read.
        norm_weight, query_weight: [H] each; only their product counts.
        output_norm_weight: [H] of the RMSNorm that follows, or None to skip it.
        extra: [M, H], added to delta, or None.
        num_blocks: N, the saved blocks that are mixed.
        write_block: where to save the new prefix, in place in ``blocks``, or None.
        restart: the new prefix is ``delta`` and not prefix + delta.
        round_prefix: delta + extra, and the new prefix before it is used as a source or
            saved, are rounded to this dtype; None keeps ``compute``.
        compute: dtype of all arithmetic.

    Returns:
        hidden [M, H] in ``compute``, not rounded, and the new prefix [M, H] in
        prefix's dtype.

    Raises:
        ValueError: for shapes that do not fit, a block out of range, a write over a
            block that this call reads, or a restart without a delta.
    """
    rows, width = prefix.shape
    capacity = blocks.shape[1]
    if blocks.shape != (rows, capacity, width) or (
        delta is not None and delta.shape != prefix.shape
    ):
        raise ValueError(
            f"prefix is {tuple(prefix.shape)}, delta "
            f"{None if delta is None else tuple(delta.shape)}, blocks "
            f"{tuple(blocks.shape)}; they must be [M, H], [M, H] and [M, blocks, H]"
        )
    for name, weight in (
        ("norm_weight", norm_weight),
        ("query_weight", query_weight),
        ("output_norm_weight", output_norm_weight),
    ):
        if weight is not None and weight.shape != (width,):
            raise ValueError(f"{name} is {tuple(weight.shape)}; it must be [{width}]")
    if not 0 <= num_blocks <= capacity:
        raise ValueError(f"num_blocks is {num_blocks}; it must be 0 to {capacity}")
    if write_block is not None and not num_blocks <= write_block < capacity:
        raise ValueError(
            f"write_block is {write_block} with num_blocks {num_blocks}; it must be "
            f"{num_blocks} to {capacity - 1}, a block this call does not read"
        )
    if restart and delta is None:
        raise ValueError("restart is True without delta; give the new prefix as delta")
    if extra is not None and (delta is None or extra.shape != delta.shape):
        raise ValueError(f"extra is {tuple(extra.shape)}; it must be that of delta")

    score_weight = norm_weight.to(compute) * query_weight.to(compute)
    final = None if output_norm_weight is None else output_norm_weight.to(compute)
    hidden = torch.empty(rows, width, dtype=compute, device=prefix.device)
    updated = torch.empty_like(prefix)
    for m in range(rows):
        p = prefix[m].to(compute)
        if delta is not None:
            step = delta[m].to(compute)
            if extra is not None:
                step = step + extra[m].to(compute)
                if round_prefix is not None:
                    step = step.to(round_prefix).to(compute)
            p = step if restart else p + step
            if round_prefix is not None:
                p = p.to(round_prefix).to(compute)
        updated[m] = p
        if write_block is not None:
            blocks[m, write_block] = p
        h = p
        if num_blocks:
            sources = torch.cat((blocks[m, :num_blocks].to(compute), p[None]))
            h = _mix(sources, score_weight, eps)
        if final is not None:
            h = h * torch.rsqrt(h.pow(2).mean(-1) + output_norm_eps) * final
        hidden[m] = h
    return hidden, updated
