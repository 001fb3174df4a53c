# SPDX-License-Identifier: Apache-2.0
"""This package's kernels as candidates."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from experiments.bench.candidate import (
    MODES,
    OURS,
    Candidate,
    Inputs,
    Mode,
    Offer,
    reason,
)
from experiments.bench.shapes import Projection

_EPS = 1e-5


def _load(module: str, name: str) -> tuple[Any, Offer]:
    try:
        return getattr(importlib.import_module(module), name), Offer()
    except (ImportError, AttributeError) as error:
        return None, Offer(missing={OURS: reason(error)})


def skinny_gemm(shape: Projection, modes: tuple[Mode, ...] = MODES) -> Offer:
    """``verify_kernels.skinny_gemm.SkinnyGemm`` for one projection."""
    kind, offer = _load("verify_kernels.skinny_gemm", "SkinnyGemm")
    if kind is None:
        return offer
    dtype = torch.float32 if shape.fp32_out else torch.bfloat16
    for mode in modes:
        try:
            gemm = kind(shape.k, out_dtype=dtype, pdl=mode == "pdl")
        except Exception as error:
            offer.missing[f"{OURS}:{mode}"] = reason(error)
            continue

        def run(inputs: Inputs, out: Tensor, gemm: Any = gemm) -> Tensor:
            x, w = inputs
            gemm(x, w, out)
            return out

        offer.candidates.append(Candidate(OURS, mode, run))
    return offer


def attn_res(num_blocks: int, modes: tuple[Mode, ...] = MODES) -> Offer:
    """``verify_kernels.attn_res.attn_res`` with N = num_blocks, no block written."""
    function, offer = _load("verify_kernels.attn_res", "attn_res")
    if function is None:
        return offer
    for mode in modes:

        def run(inputs: Inputs, out: Tensor, mode: Mode = mode) -> Tensor:
            function(
                *inputs,
                out,
                num_blocks=num_blocks,
                eps=_EPS,
                output_norm_eps=_EPS,
                pdl=mode == "pdl",
            )
            return out

        offer.candidates.append(Candidate(OURS, mode, run))
    return offer
