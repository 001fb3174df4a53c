# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA over a paged cache in plain torch, any device: the truth for kernels.

With x the attention input, [q_a | kv_a | gate] = W x, C the latent width and no rotary
embedding anywhere (Kimi K3 leaves its "rope" part unrotated):

    q_h    = (W_qb RMSNorm(q_a))_h = [n_h | p_h]            per head h
    line   = [RMSNorm(kv_a[:C]) | kv_a[C:]]                 what the cache holds
    s_hj   = <[W_UK_h^T n_h | p_h], line_j> (nope + rope)^-1/2
    o_h    = W_UV_h sum_j softmax(s_h)_j line_j[:C]
    out    = o * sigmoid(gate)

Row t of a request with history H stands at position H + t and sees positions 0 .. H +
t. Its line is written before anything is read, so a line of a rejected row is simply
overwritten by the next step: there is nothing to undo. Position p of request b is line
p mod page of the page ``block_table[b, p // page]``.

Every row is computed alone, in shapes set by its own position: batched torch products
are not bit for bit the same for every number of rows.

`partial` and `merge` are the same attention split over keys, for split-KV kernels and
context parallelism: a split gives the normalised latent and the log-sum-exp of its
scaled scores (natural logarithm), an empty split 0 and -inf, and `merge` adds splits in
the order given, in which an empty one adds an exact zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.batch import VerifyBatch

ALL_KEYS = slice(None)


@dataclass(frozen=True)
class MlaWeights:
    """q_a_norm [q_lora]; kv_norm [kv_lora]; w_qb [heads (nope + rope), q_lora], per
    head nope first; w_uk [heads, nope, kv_lora]; w_uv [heads, v_head, kv_lora].

    Kimi K3: q_lora 1536, kv_lora 512, nope 128, rope 64, v_head 128, 96 heads before
    tensor parallelism.
    """

    q_a_norm: Tensor
    kv_norm: Tensor
    w_qb: Tensor
    w_uk: Tensor
    w_uv: Tensor
    norm_eps: float = 1e-5

    @property
    def heads(self) -> int:
        return self.w_uk.shape[0]

    @property
    def nope(self) -> int:
        return self.w_uk.shape[1]

    @property
    def kv_lora(self) -> int:
        return self.w_uk.shape[2]

    @property
    def rope(self) -> int:
        return self.w_qb.shape[0] // self.heads - self.nope

    @property
    def line(self) -> int:
        """Elements of one cache line, kv_lora + rope."""
        return self.kv_lora + self.rope

    @property
    def scale(self) -> float:
        """Factor of the scores; the absorbed width plays no part in it."""
        return (self.nope + self.rope) ** -0.5


@dataclass(frozen=True)
class MlaRows:
    """Projections of the step's rows, M rows (padding included): q_a [M, q_lora],
    kv_a [M, kv_lora + rope], gate [M, heads v_head]."""

    q_a: Tensor
    kv_a: Tensor
    gate: Tensor

    @classmethod
    def unpack(cls, packed: Tensor, weights: MlaWeights) -> MlaRows:
        """Split vLLM's packed projection [q_a | kv_a | gate | pad], as views.

        packed [M, q_lora + kv_lora + rope + heads v_head + pad], where pad >= 0
        columns are not read. ValueError if it is narrower.
        """
        heads, v_head, _ = weights.w_uv.shape
        sizes = [weights.q_a_norm.shape[0], weights.line, heads * v_head]
        if packed.shape[1] < sum(sizes):
            raise ValueError(
                f"packed is {packed.shape[1]} wide; q_a, kv_a and gate need "
                f"{' + '.join(map(str, sizes))} = {sum(sizes)} columns"
            )
        return cls(*packed[:, : sum(sizes)].split(sizes, dim=1))


def verify(
    batch: VerifyBatch, rows: MlaRows, weights: MlaWeights, cache: Tensor
) -> Tensor:
    """Gated outputs [M, heads v_head]; padding rows and requests with slot <= 0 give 0.

    cache [blocks, page, kv_lora + rope] receives the rows' lines first, rounded to its
    dtype; arithmetic is in the dtype of rows and weights (fp32 or fp64). Raises
    ValueError, with nothing written, for shapes and block tables that do not fit.
    """
    insert(batch, rows, weights, cache)
    latent, _ = partial(batch, queries(batch, rows, weights), weights, cache)
    return finish(batch, latent, rows, weights)


def queries(batch: VerifyBatch, rows: MlaRows, weights: MlaWeights) -> Tensor:
    """Absorbed query rows [M, heads, kv_lora + rope]; 0 where a row is padding."""
    _check(batch, rows, weights)
    out = rows.q_a.new_zeros(rows.q_a.shape[0], weights.heads, weights.line)
    for _, row, _ in _live(batch):
        normed = _rms_norm(rows.q_a[row].clone(), weights.q_a_norm, weights.norm_eps)
        q = (weights.w_qb @ normed).view(weights.heads, -1)
        nope = q[:, None, : weights.nope].contiguous()
        out[row, :, : weights.kv_lora] = torch.bmm(nope, weights.w_uk)[:, 0]
        out[row, :, weights.kv_lora :] = q[:, weights.nope :]
    return out


def insert(
    batch: VerifyBatch, rows: MlaRows, weights: MlaWeights, cache: Tensor
) -> None:
    """Write the cache line of every live row; see `verify` for shapes and errors."""
    _check(batch, rows, weights)
    table = _checked_table(batch, weights, cache)
    page = cache.shape[1]
    for b, row, position in _live(batch):
        block = int(table[b, position // page])
        kv_a, width = rows.kv_a[row].clone(), weights.kv_lora
        latent = _rms_norm(kv_a[:width], weights.kv_norm, weights.norm_eps)
        cache[block, position % page, :width] = latent.to(cache.dtype)
        cache[block, position % page, width:] = kv_a[width:].to(cache.dtype)


def partial(
    batch: VerifyBatch,
    query: Tensor,
    weights: MlaWeights,
    cache: Tensor,
    keys: slice = ALL_KEYS,
) -> tuple[Tensor, Tensor]:
    """Attend to the part ``keys`` of each row's positions 0 .. history + t.

    query [M, heads, kv_lora + rope] from `queries`. ``keys`` selects absolute
    positions: slice(a, b) is a key chunk, slice(rank, None, world) the share of a rank
    when positions are dealt out one by one. Returns the latent [M, heads, kv_lora] and
    the log-sum-exp [M, heads]; rows without a key, padding among them, give 0 and -inf.
    ValueError for a slice that counts from the end or backwards.
    """
    bounds = [x for x in (keys.start, keys.stop) if x is not None]
    if any(x < 0 for x in bounds) or (keys.step or 1) < 1:
        raise ValueError(
            f"keys is {keys}; start and stop are absolute positions >= 0 and step >= 1"
        )
    table = _checked_table(batch, weights, cache)
    latent = query.new_zeros(*query.shape[:2], weights.kv_lora)
    lse = query.new_full(query.shape[:2], -torch.inf)
    page = cache.shape[1]
    for b, row, position in _live(batch):
        at = torch.arange(position + 1, device=cache.device)[keys]
        if not len(at):
            continue
        blocks = table[b, at // page].long()
        lines = cache[blocks, at % page].to(query.dtype)
        scores = query[row].clone() @ lines.T * weights.scale
        top = scores.amax(-1, keepdim=True)
        weight = (scores - top).exp()
        total = weight.sum(-1, keepdim=True)
        latent[row] = weight @ lines[:, : weights.kv_lora] / total
        lse[row] = (top + total.log())[:, 0]
    return latent, lse


def merge(latents: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join S splits, [S, M, heads, kv_lora] and [S, M, heads], in the order of S.

    latent = sum_i e^{lse_i - top} latent_i / sum_i e^{lse_i - top}, top = max_i lse_i;
    both sums run from split 0 on. Where all splits are empty: 0 and -inf.
    """
    latent, lse = torch.empty_like(latents[0]), torch.empty_like(lses[0])
    for row in range(lses.shape[1]):
        of_row = lses[:, row].clone()
        top = of_row.amax(0)
        share = (of_row - top.masked_fill(top == -torch.inf, 0)).exp()
        value, total = torch.zeros_like(latent[row]), torch.zeros_like(top)
        for i in range(lses.shape[0]):
            value = value + share[i, :, None] * latents[i, row]
            total = total + share[i]
        latent[row] = value / total.masked_fill(total == 0, 1)[:, None]
        lse[row] = top + total.log()
    return latent, lse


def finish(
    batch: VerifyBatch, latent: Tensor, rows: MlaRows, weights: MlaWeights
) -> Tensor:
    """From the latent [M, heads, kv_lora] to gated outputs [M, heads v_head]."""
    _check(batch, rows, weights)
    out = torch.zeros_like(rows.gate)
    for _, row, _ in _live(batch):
        value = torch.bmm(weights.w_uv, latent[row].clone()[:, :, None])
        out[row] = value.flatten() * torch.sigmoid(rows.gate[row].clone())
    return out


def _live(batch: VerifyBatch) -> Iterator[tuple[int, int, int]]:
    """(request, row, position) of every row that is not padding."""
    starts, history = batch.row_start.tolist(), batch.history.tolist()
    for b, slot in enumerate(batch.state_slots.tolist()):
        if slot > 0:
            for row in range(starts[b], starts[b + 1]):
                yield b, row, history[b] + row - starts[b]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + eps) * weight


def _check(batch: VerifyBatch, rows: MlaRows, weights: MlaWeights) -> None:
    batch.check()
    heads, v_head, kv_lora = weights.w_uv.shape
    q_lora = weights.q_a_norm.shape[0]
    count = rows.q_a.shape[0]
    shapes = {
        "w_uk": (weights.w_uk, (heads, weights.nope, kv_lora)),
        "w_qb": (weights.w_qb, (heads * (weights.nope + weights.rope), q_lora)),
        "kv_norm": (weights.kv_norm, (kv_lora,)),
        "q_a": (rows.q_a, (count, q_lora)),
        "kv_a": (rows.kv_a, (count, weights.line)),
        "gate": (rows.gate, (count, heads * v_head)),
    }
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape or tensor.dtype != rows.q_a.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be "
                f"{rows.q_a.dtype} {list(shape)} to fit the other weights and rows"
            )
    if count < int(batch.row_start[-1]):
        raise ValueError(
            f"q_a has {count} rows and row_start ends at {int(batch.row_start[-1])}; "
            "pass a row for every row of the batch"
        )


def _checked_table(batch: VerifyBatch, weights: MlaWeights, cache: Tensor) -> Tensor:
    if batch.block_table is None:
        raise ValueError("block_table is None; MLA needs the pages [B, blocks]")
    if cache.ndim != 3 or cache.shape[2] != weights.line:
        raise ValueError(
            f"cache is {tuple(cache.shape)}; it must be [blocks, page, {weights.line}]"
        )
    blocks, page, _ = cache.shape
    table = batch.block_table.tolist()
    needed = {}
    for b, _, position in _live(batch):
        if position < 0:
            raise ValueError(f"history[{b}] is negative; it counts committed tokens")
        needed[b] = position // page + 1
    for b, count in needed.items():
        used = table[b][:count]
        if len(used) < count or any(not 0 <= block < blocks for block in used):
            raise ValueError(
                f"block_table[{b}] begins {used}; the request's positions need {count} "
                f"pages of {page}, each in 0 .. {blocks - 1}"
            )
    return batch.block_table
