# SPDX-License-Identifier: Apache-2.0
"""Steps over a paged latent cache, and what attention gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.batch import VerifyBatch

LINE, LATENT = 576, 512
SCALE = 192**-0.5


@dataclass(frozen=True)
class Case:
    """A step: queries, and a cache of which the rest is NaN."""

    batch: VerifyBatch
    query: Tensor
    cache: Tensor


def make(
    histories: Sequence[int],
    widths: Sequence[int],
    heads: int,
    *,
    page: int = 64,
    rows: int | None = None,
    dead: Sequence[int] = (),
    gap: int = 0,
    seed: int = 0,
    spread: float = 1.0,
    device: torch.device | str = "cpu",
) -> Case:
    """Requests with these histories and widths, pages in a random order.

    Args:
        rows: of the query, padding included; default no padding. What pads is NaN.
        dead: requests whose slot is 0.
        gap: elements between pages, NaN.
        spread: of the queries.
    """
    random = torch.Generator().manual_seed(seed)
    start = torch.zeros(len(widths) + 1, dtype=torch.int32)
    start[1:] = torch.tensor(widths, dtype=torch.int32).cumsum(0)
    live = int(start[-1])
    query = torch.full((rows or live, heads, LINE), torch.nan)
    query[:live] = torch.randn(live, heads, LINE, generator=random) * spread
    keys = [h + w for h, w in zip(histories, widths, strict=True)]
    counts = [-(-n // page) for n in keys]
    order = torch.randperm(sum(counts) + 1, generator=random).int().tolist()
    # Behind a request's pages its row of the table names one that is all NaN.
    unused = order.pop()
    table = torch.full((len(keys), max(counts) + 1), unused, dtype=torch.int32)
    storage = torch.full((sum(counts) + 1, page * LINE + gap), torch.nan)
    cache = storage.bfloat16()[:, : page * LINE].unflatten(1, (page, LINE))
    for b, (count, number) in enumerate(zip(keys, counts, strict=True)):
        lines = torch.randn(count, LINE, generator=random).bfloat16()
        for i in range(number):
            table[b, i] = order.pop()
            part = lines[page * i : page * (i + 1)]
            cache[table[b, i], : len(part)] = part
    slots = torch.arange(1, len(keys) + 1, dtype=torch.int32)
    slots[list(dead)] = 0
    batch = VerifyBatch(
        start, torch.tensor(histories, dtype=torch.int32), slots, slots, table
    )
    query = query.bfloat16()
    if str(device) != "cpu":
        cache = (
            storage.bfloat16()
            .to(device)[:, : page * LINE]
            .unflatten(1, (page, LINE))
            .copy_(cache)
        )
        query = query.to(device)
        moved = {k: v.to(device) for k, v in vars(batch).items()}
        batch = VerifyBatch(**moved)
    return Case(batch, query, cache)


def expected(
    case: Case, causal: bool = True, kind: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Latents [M, H, 512] and log-sum-exps [M, H]; rows of no request 0 and -inf.

    In fp64, or as plain bf16 torch has it: products of bf16 with fp32 sums, weights
    and latents rounded to bf16.
    """
    batch, query, cache = case.batch, case.query, case.cache
    latent = torch.zeros(*query.shape[:2], LATENT, dtype=kind, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=kind, device=query.device)
    starts, histories = batch.row_start.tolist(), batch.history.tolist()
    page = cache.shape[1]
    assert batch.block_table is not None
    for b, slot in enumerate(batch.state_slots.tolist()):
        for row in range(starts[b], starts[b + 1]) if slot > 0 else ():
            t, width = row - starts[b], starts[b + 1] - starts[b]
            keys = histories[b] + (t + 1 if causal else width)
            at = torch.arange(keys, device=query.device)
            lines = cache[batch.block_table[b, at // page].long(), at % page]
            wide = torch.float64 if kind == torch.float64 else torch.float32
            scores = query[row].to(wide) @ lines.to(wide).T * SCALE
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            if kind != torch.float64:
                weights = weights.to(kind).to(wide)
            sums = weights @ lines[:, :LATENT].to(wide)
            latent[row] = (sums / total).to(kind)
            lse[row] = (top + total.log())[:, 0].to(kind)
    return latent, lse
