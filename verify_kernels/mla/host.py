# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA on the GPU: its buffers, the checks, the launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS, VerifyBatch
from verify_kernels.common.checks import Argument, check_all
from verify_kernels.common.variant import Variant, cached, device_arch
from verify_kernels.mla import parts
from verify_kernels.mla.parts import LATENT, LINE, NOPE, Q_LORAS, ROPE, VALUE

__all__ = ["Q_LORAS"]

#: (heads, log2 of the most splits of a row): more heads are more tiles of a request, so
#: fewer splits keep an H200's SMs busy, and their sums take room and time.
SPLITS = ((12, 6), (24, 5), (96, 4))
#: Tokens of a page are a multiple of it.
PAGE_STEP = 16


def variants() -> list[Variant]:
    """Every form: none depends on heads, requests or pages."""
    return [
        *(parts.front_variant(q_lora) for q_lora in Q_LORAS),
        parts.absorb_variant(),
        parts.attend_variant(),
        parts.merge_variant(),
        parts.value_variant(),
    ]


def split_bits(heads: int) -> int:
    """log2 of the most splits of a row's keys, of a model with so many heads a rank.

    Raises:
        ValueError: not 1 to 96 heads.
    """
    for most, bits in SPLITS:
        if 1 <= heads <= most:
            return bits
    raise ValueError(f"heads is {heads}; the kernels take 1 to {SPLITS[-1][0]}")


@dataclass(frozen=True)
class MlaSpace:
    """What attention leaves for its merge; one for all layers, whose launches follow
    each other on one stream. 50 to 100 MB for 6 to 48 heads, 200 for 96.

    Attributes:
        sums: fp32 [64 H, S, 512], of each of a (row, head) pair's S splits.
        scales: fp32 [64 H, S, 2], their maxima and sums of weights.
    """

    sums: Tensor
    scales: Tensor

    @classmethod
    def allocate(cls, heads: int, device: torch.device | str) -> MlaSpace:
        """For ``heads`` heads and 64 rows; NaN, so a wrong read shows.

        Raises:
            ValueError: not 1 to 96 heads.
        """
        shape = (MAX_ROWS * heads, 1 << split_bits(heads))
        sums, scales = (
            torch.full((*shape, width), torch.nan, dtype=torch.float32, device=device)
            for width in (LATENT, 2)
        )
        return cls(sums, scales)

    def arguments(self, heads: int) -> list[Argument]:
        """As `check_all` takes them."""
        shape = (MAX_ROWS * heads, 1 << split_bits(heads))
        return [
            ("space.sums", self.sums, torch.float32, (*shape, LATENT), 0, 16),
            ("space.scales", self.scales, torch.float32, (*shape, 2), 0, 16),
        ]


def mla_front(
    packed: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    batch: VerifyBatch,
    cache: Tensor,
    out: Tensor,
    *,
    eps: float,
    counted: bool = False,
    pdl: bool = True,
) -> Tensor:
    """RMS norms of a step's q_a and latents, whose lines go into the cache; one launch.

    Norms are fp32 and rounded once. Rows of no request are zeros and write no line.

    Args:
        packed: bf16 [M, P], M = 0 .. 64: [q_a | kv_a 576 | anything]; rows may lie
            apart.
        q_norm, kv_norm: bf16 [q_lora] and [512]; static, read before earlier kernels
            end.
        batch: the step, with its block table.
        cache: bf16 [pages, page, 576], page a multiple of 16; pages may lie apart.
        out: bf16 [M, q_lora], the normed q_a, q_lora one of `Q_LORAS`; replaced.
        eps: added to the mean squares.
        counted: ``batch.history`` counts the step's rows, as vLLM's lengths do.
        pdl: launch without waiting for earlier kernels to end; the kernel waits itself.

    Returns:
        ``out``.

    Raises:
        ValueError: for a shape, dtype, layout or device that does not fit. Nothing is
            written then.
    """
    rows, q_lora = _matrix("out", out)
    if q_lora not in Q_LORAS:
        raise ValueError(
            f"out is {tuple(out.shape)}; kernels are compiled for rows of "
            f"{' and '.join(map(str, Q_LORAS))} columns"
        )
    width = _matrix("packed", packed)[1]
    if width < q_lora + LINE:
        raise ValueError(
            f"packed is {tuple(packed.shape)}; q_a and kv_a need {q_lora} + {LINE} "
            "columns"
        )
    arguments: list[Argument] = [
        ("packed", packed, torch.bfloat16, (rows, width), 1, 16),
        ("q_norm", q_norm, torch.bfloat16, (q_lora,), 0, 16),
        ("kv_norm", kv_norm, torch.bfloat16, (LATENT,), 0, 16),
        ("out", out, torch.bfloat16, (rows, q_lora), 1, 16),
        *_step(batch, cache),
    ]
    check_all(arguments, packed.device, "packed")
    if rows:
        _launch(packed, f"front_q{q_lora}")(
            packed,
            q_norm,
            kv_norm,
            cache,
            batch.block_table,
            batch.row_start,
            batch.history,
            batch.state_slots,
            out,
            eps,
            int(counted),
            int(pdl),
        )
    return out


def mla_absorb(q: Tensor, w_uk: Tensor, query: Tensor, *, pdl: bool = True) -> Tensor:
    """Query rows as wide as a cache line: [W_UK^T nope | rope] of every head; one
    launch.

    Args:
        q: bf16 [M, H 192], M = 0 .. 64, per head 128 nope then 64 rope; rows may lie
            apart.
        w_uk: bf16 [H, 128, 512], heads may lie apart; static, read before earlier
            kernels end.
        query: bf16 [M, H, 576], replaced.
        pdl: as in `mla_front`.

    Returns:
        ``query``.

    Raises:
        ValueError: for a shape, dtype, layout or device that does not fit. Nothing is
            written then.
    """
    rows, heads = _pairs("query", query, LINE)
    arguments: list[Argument] = [
        ("q", q, torch.bfloat16, (rows, heads * (NOPE + ROPE)), 1, 16),
        ("w_uk", w_uk, torch.bfloat16, (heads, NOPE, LATENT), 1, 16),
        ("query", query, torch.bfloat16, (rows, heads, LINE), 0, 16),
    ]
    check_all(arguments, query.device, "query")
    if rows:
        _launch(query, "absorb")(q, w_uk, query, int(pdl))
    return query


def mla_attend(
    query: Tensor,
    cache: Tensor,
    batch: VerifyBatch,
    space: MlaSpace,
    latent: Tensor,
    *,
    scale: float,
    causal: bool = True,
    counted: bool = False,
    lse: Tensor | None = None,
    pdl: bool = True,
) -> Tensor:
    """Attention of a step's rows over the paged cache; two launches.

    The equations are in `verify_kernels.mla.reference` (`partial`). Scores and sums are
    fp32, weights bf16, as are the latents. The bits of a row depend on its own query
    and keys, on H and the GPU's architecture: not on the step's other rows, pages or
    SMs, as long as the lines of later rows of its request are finite.

    Args:
        query: bf16 [M, H, 576], M = 0 .. 64, H = 1 .. 96.
        cache: bf16 [pages, page, 576], page a multiple of 16; pages may lie apart.
            Lines behind a request's last are not read.
        batch: the step; its block table must cover every request's keys and is
            trusted.
        space: for H heads; replaced.
        latent: bf16 [M, H, 512], replaced; rows of no request are zeros.
        scale: of the scores, above 0.
        causal: row t sees the history and rows 0 .. t; else all rows of its request.
        counted: ``batch.history`` counts the step's rows, as vLLM's lengths do.
        lse: fp32 [M, H], replaced by the log-sum-exp of the scaled scores, -inf for
            rows of no request; None if nobody wants it.
        pdl: as in `mla_front`.

    Returns:
        ``latent``.

    Raises:
        ValueError: for a shape, dtype, layout or device that does not fit. Nothing is
            written then.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be a finite number above 0")
    rows, heads = _pairs("query", query, LINE)
    most = split_bits(heads)
    arguments: list[Argument] = [
        ("query", query, torch.bfloat16, (rows, heads, LINE), 0, 16),
        ("latent", latent, torch.bfloat16, (rows, heads, LATENT), 0, 16),
        ("lse", lse, torch.float32, (rows, heads), 0, 4),
        *space.arguments(heads),
        *_step(batch, cache),
    ]
    check_all(arguments, query.device, "query")
    if not rows:
        return latent
    attend, merge = _launch(query, "attend"), _launch(query, "merge")
    lengths = (batch.row_start, batch.history, batch.state_slots)
    flags = (most, int(causal), int(counted))
    attend(
        query,
        cache,
        batch.block_table,
        *lengths,
        space.sums,
        space.scales,
        scale,
        *flags,
        _processors(query.device.index),
        int(pdl),
    )
    # Without a wish for it no number of what stands for it is written.
    told = space.scales.view(-1)[: rows * heads].view(rows, heads)
    merge(
        space.sums,
        space.scales,
        *lengths,
        latent,
        told if lse is None else lse,
        *flags,
        int(lse is not None),
        int(pdl),
    )
    return latent


def mla_value(
    latent: Tensor, w_uv: Tensor, gate: Tensor, out: Tensor, *, pdl: bool = True
) -> Tensor:
    """Gated values of every head, W_UV latent * sigmoid(gate), rounded once; one
    launch. Rows of no request are as finite as their gate is.

    Args:
        latent: bf16 [M, H, 512], M = 0 .. 64.
        w_uv: bf16 [H, 128, 512], heads may lie apart; static, read before earlier
            kernels end.
        gate: bf16 [M, H 128]; rows may lie apart.
        out: bf16 [M, H 128], replaced; rows may lie apart.
        pdl: as in `mla_front`.

    Returns:
        ``out``.

    Raises:
        ValueError: for a shape, dtype, layout or device that does not fit. Nothing is
            written then.
    """
    rows, heads = _pairs("latent", latent, LATENT)
    matrix = (rows, heads * VALUE)
    arguments: list[Argument] = [
        ("latent", latent, torch.bfloat16, (rows, heads, LATENT), 0, 16),
        ("w_uv", w_uv, torch.bfloat16, (heads, VALUE, LATENT), 1, 16),
        ("gate", gate, torch.bfloat16, matrix, 1, 16),
        ("out", out, torch.bfloat16, matrix, 1, 16),
    ]
    check_all(arguments, latent.device, "latent")
    if rows:
        _launch(latent, "value")(latent, w_uv, gate, out, int(pdl))
    return out


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of a step's rows, or ValueError."""
    if tensor.ndim != 2 or tensor.shape[0] > MAX_ROWS:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; it must be [M, columns], M at most "
            f"{MAX_ROWS}"
        )
    return tensor.shape[0], tensor.shape[1]


def _pairs(name: str, tensor: Tensor, width: int) -> tuple[int, int]:
    """Rows and heads of [M, H, width], or ValueError."""
    if tensor.ndim != 3 or tensor.shape[0] > MAX_ROWS or tensor.shape[2] != width:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; it must be [M, H, {width}], M at most "
            f"{MAX_ROWS}"
        )
    split_bits(tensor.shape[1])
    return tensor.shape[0], tensor.shape[1]


def _step(batch: VerifyBatch, cache: Tensor) -> Sequence[Argument]:
    """A step and its cache, as `check_all` takes them; ValueError for what that does
    not see."""
    table = batch.block_table
    if batch.row_start.ndim != 1:
        raise ValueError(
            f"batch.row_start is {tuple(batch.row_start.shape)}; it must be [B + 1]"
        )
    if table is None:
        raise ValueError("batch.block_table is None; MLA needs the pages [B, N]")
    if not 1 <= batch.size <= MAX_ROWS:
        raise ValueError(f"batch has {batch.size} requests; it must be 1 to {MAX_ROWS}")
    if table.ndim != 2 or table.shape[1] < 1:
        raise ValueError(
            f"batch.block_table is {tuple(table.shape)}; it must be [B, N], N >= 1"
        )
    if cache.ndim != 3 or cache.shape[1] % PAGE_STEP or not cache.shape[1]:
        raise ValueError(
            f"cache is {tuple(cache.shape)}; it must be [pages, page, {LINE}], page a "
            f"multiple of {PAGE_STEP}"
        )
    pages, page, _ = cache.shape
    one = (batch.size,)
    return [
        ("cache", cache, torch.bfloat16, (pages, page, LINE), 1, 16),
        ("batch.block_table", table, torch.int32, (*one, table.shape[1]), 1, 4),
        ("batch.row_start", batch.row_start, torch.int32, (batch.size + 1,), 0, 4),
        ("batch.history", batch.history, torch.int32, one, 0, 4),
        ("batch.state_slots", batch.state_slots, torch.int32, one, 0, 4),
    ]


def _launch(tensor: Tensor, name: str) -> Callable[..., None]:
    """The compiled kernel for the tensor's device, or ValueError."""
    if tensor.device.type != "cuda":
        raise ValueError(
            f"the rows are on {tensor.device}; the kernels need a CUDA device: move "
            "the tensors there or use verify_kernels.mla.reference"
        )
    return _compiled(tensor.device.index, name)


@functools.cache
def _compiled(device: int, name: str) -> Callable[..., None]:
    variant = next(v for v in variants() if v.name == name)
    launch: Callable[..., None] = cached(variant, device_arch(device))
    return launch


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
