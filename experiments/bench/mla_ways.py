# SPDX-License-Identifier: Apache-2.0
"""Ways of this package to run a step of MLA: latents [M, H, 512], or in a sublayer
o_proj's output [M, 7168]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.bench.candidate import OURS, Mode, reason
from experiments.bench.mla_data import EPS, SCALE, SUBLAYER, MlaData
from experiments.bench.ways import Run, Way, Ways
from experiments.byte_model import HIDDEN, Q_LORA
from verify_kernels.mla.parts import LATENT, LINE, NOPE, ROPE, VALUE


def new(data: MlaData, *size: int) -> Tensor:
    """A bf16 buffer for the step's rows, [M, ...], full of NaN."""
    return data.rows.new_full((data.shape.rows, *size), torch.nan)


def _core(pdl: bool) -> Callable[[MlaData], Run]:
    from verify_kernels.mla import MlaSpace, mla_attend

    def make(data: MlaData) -> Run:
        heads = data.shape.heads
        space = MlaSpace.allocate(heads, data.rows.device)
        out = new(data, heads, LATENT)

        def run(copy: int) -> Tensor:
            return mla_attend(
                data.rows,
                data.caches[copy],
                data.batch,
                space,
                out,
                scale=SCALE,
                causal=data.shape.causal,
                pdl=pdl,
            )

        return run

    return make


def _sublayer(pdl: bool) -> Callable[[MlaData], Run]:
    from verify_kernels.mla import (
        MlaSpace,
        mla_absorb,
        mla_attend,
        mla_front,
        mla_value,
    )
    from verify_kernels.skinny_gemm import SkinnyGemm

    def make(data: MlaData) -> Run:
        heads, batch = data.shape.heads, data.batch
        project = SkinnyGemm(HIDDEN, pdl=pdl)
        widen = SkinnyGemm(Q_LORA, pdl=pdl)
        finish = SkinnyGemm(heads * VALUE, pdl=pdl)
        space = MlaSpace.allocate(heads, data.rows.device)
        packed = new(data, data.shape.packed_columns)
        gate = packed[:, Q_LORA + LINE :]
        normed, q = new(data, Q_LORA), new(data, heads * (NOPE + ROPE))
        query, latent = new(data, heads, LINE), new(data, heads, LATENT)
        gated, out = new(data, heads * VALUE), new(data, HIDDEN)

        def run(copy: int) -> Tensor:
            w, cache = data.weights[copy], data.caches[copy]
            project(data.rows, w.qkv_a_g, packed)
            mla_front(
                packed, w.q_norm, w.kv_norm, batch, cache, normed, eps=EPS, pdl=pdl
            )
            widen(normed, w.q_b, q)
            mla_absorb(q, w.w_uk, query, pdl=pdl)
            mla_attend(query, cache, batch, space, latent, scale=SCALE, pdl=pdl)
            mla_value(latent, w.w_uv, gate, gated, pdl=pdl)
            finish(gated, w.o_proj, out)
            return out

        return run

    return make


def ours(part: str, modes: Sequence[Mode]) -> Ways[MlaData]:
    """``verify_kernels.mla`` for one part; a sublayer's projections are
    ``verify_kernels.skinny_gemm``."""
    maker = _sublayer if part == SUBLAYER else _core
    try:
        return Ways([Way(OURS, mode, maker(mode == "pdl")) for mode in modes])
    except ImportError as error:
        return Ways(missing={OURS: reason(error)})
